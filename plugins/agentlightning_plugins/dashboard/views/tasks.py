"""The tasks that two runs both validated on: the difference in reward, and the tasks that flipped."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Metrics, Rollout
from agentlightning_plugins.shared.statistics.interval import paired_p_value

_MAX_ROLLOUTS: Final = 400
"""Number of the newest rollouts that are searched for the validation of an algorithm without steps."""
_MAX_FLIPPED: Final = 50
_SOLVED: Final = 0.5
"""Minimum mean reward of a solved task; a task flipped if only one of the runs solved it."""


async def compare_tasks(sides: Sequence[tuple[LightningStore, Sequence[Metrics]]]) -> dict[str, Any] | None:
    """Compares two runs by the rollouts of their last validations; None if they share no task."""
    one, other = [await _read_rewards(store, steps) for store, steps in sides]
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    means = [(task, statistics.fmean(one[task][0]), statistics.fmean(other[task][0])) for task in shared]
    differences = [after - before for _, before, after in means]
    flipped: list[dict[str, Any]] = [
        {"task": task[:400], "rewards": [before, after], "rollouts": [one[task][1], other[task][1]]}
        for task, before, after in means
        if (before >= _SOLVED) != (after >= _SOLVED)
    ]
    return {
        "count": len(shared),
        "difference": statistics.fmean(differences),
        "p_value": await asyncio.to_thread(paired_p_value, differences),
        "gained": sum(each["rewards"][1] >= _SOLVED for each in flipped),
        "lost": sum(each["rewards"][1] < _SOLVED for each in flipped),
        "flipped": flipped[:_MAX_FLIPPED],
    }


async def _read_rewards(store: LightningStore, steps: Sequence[Metrics]) -> dict[str, tuple[list[float], str]]:
    """Returns the rewards of each task and the id of one of its rollouts, keyed by the task as JSON."""
    step = next((each.step for each in reversed(steps) if "val_reward" in each.values), None)
    found: Iterable[Rollout] = ()
    if step is not None:
        found = await store.query_rollouts(metadata={"step": step}, sort_order="desc")  # includes training rollouts
    if not any(rollout.mode == "val" for rollout in found):  # an algorithm that records no steps
        found = await store.query_rollouts(sort_order="desc", limit=_MAX_ROLLOUTS)
    rewards: dict[str, tuple[list[float], str]] = {}
    for rollout in found:
        if rollout.mode == "val" and isinstance(rollout, AttemptedRollout) and rollout.attempt.reward is not None:
            task = json.dumps(rollout.input, sort_keys=True, ensure_ascii=False, default=str)
            rewards.setdefault(task, ([], rollout.rollout_id))[0].append(rollout.attempt.reward)
    return rewards
