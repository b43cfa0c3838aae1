"""Runs: their rollouts by status and, as the dashboard and the report show it, their result so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, cast, get_args

from agentlightning.resources import Resource
from agentlightning.store.capabilities import LIVE_SUFFIX
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Metrics, RolloutStatus, Run
from agentlightning_plugins.shared.monitoring.metrics import (
    Health,
    estimate_left,
    judge,
    make_series,
    read_metrics,
    sum_phases,
)

_NEWEST: Final = 50
"""Number of newest runs that are read, and of runs with open work."""


async def count_rollouts(store: LightningStore) -> dict[str, int]:
    """Returns the number of rollouts of a run by status."""
    statuses = get_args(RolloutStatus)
    pages = await asyncio.gather(*(store.query_rollouts(status_in=[status], limit=0) for status in statuses))
    return {status: page.total for status, page in zip(statuses, pages, strict=True)}


async def read_live_state(store: LightningStore) -> Resource | None:
    """Returns the state of live learning in the store's run, the ``LiveState`` of the algorithm ``live``, or None."""
    live = await store.with_run(store.run_id + LIVE_SUFFIX).get_latest_resources()
    state = None if live is None else live.resources.get("live")
    return state if getattr(state, "resource_type", None) == "live_state" else None


async def find_run(store: LightningStore) -> Run | None:
    """Returns the run that a store sees, even one that was never created but has rollouts."""
    run = await store.get_run_by_id(store.run_id)
    if run is None and (await store.query_rollouts(limit=0)).total:
        return Run(
            run_id=store.run_id, name=store.run_id, created_at=(await store.query_rollouts(limit=1))[0].start_time
        )
    return run


async def find_newest_runs(store: LightningStore) -> list[Run]:
    """Returns a store's newest runs, its runs with open work, and the run that it sees.

    Runs with open work come first, then running ones; within these, the newest.
    """
    total = (await store.query_runs(limit=0)).total
    runs = list(await store.query_runs(offset=max(0, total - _NEWEST)))[::-1]
    open_runs = set((await store.find_open_runs())[:_NEWEST])
    for run_id in {store.run_id, *open_runs}.difference(run.run_id for run in runs):
        if (run := await find_run(store.with_run(run_id))) is not None:
            runs.append(run)
    return sorted(runs, key=lambda run: (run.run_id not in open_runs, run.status != "running"))


def describe_run(run: Run) -> dict[str, Any]:
    """Returns the fields of a run, and the name of its algorithm."""
    algorithm = run.config.get("algorithm", "")
    name = algorithm.get("name", "") if isinstance(algorithm, dict) else str(algorithm)
    return {**run.model_dump(mode="json", exclude={"scores"}), "algorithm": name}


_DRAWN: Final = {
    "best_score": ("", "mean reward of the best prompt on the whole validation set"),
    "beam_score_mean": ("", "mean score of the prompts that the search keeps"),
    "tokens": ("", "tokens of all model calls so far"),
    "entropy": ("nats per token", "how much the policy explores; near 0, all rollouts of a task are the same"),
    "response_length": ("tokens", "mean length of the model's answers"),
    "success_rate": ("", "share of the rollouts with at least the reward success_threshold"),
    "grad_norm": ("before clipping", "length of the gradient; a spike is a step that may do harm"),
    "logprob_gap_max": ("largest, between sampler and trainer", "near 0 if both compute the same probabilities"),
    "clip_fraction": ("share of tokens", "tokens whose probability has changed too much to be moved on"),
    "groups_without_spread": ("share", "groups whose rollouts have the same reward, so that they teach nothing"),
    "responses_cut_off": ("share", "answers that end at the token limit"),
    "calls_per_rollout": ("mean", "model calls of a rollout"),
    "tokens_per_s": ("", "tokens that the model samples in a second"),
}
"""The metrics that are drawn: their units and what they mean."""
_REWARDS: Final = ("reward", "val_reward", "test_reward")


def find_curve(steps: Sequence[Metrics]) -> list[dict[str, float]]:
    """Returns the rewards by step that stand for a run: in training, else in validation."""
    return make_series(steps, "reward") or make_series(steps, "train_reward") or make_series(steps, "val_reward")


async def read_result(store: LightningStore, metric: str = "") -> dict[str, Any]:
    """Returns the reward, health, time by phase and metrics of a store's run; draws ``metric`` first."""
    run = await find_run(store) or Run(run_id=store.run_id, name=store.run_id)
    steps = await read_metrics(store)
    names = list(dict.fromkeys(name for each in steps for name in each.values))
    reward: dict[str, Any] = {name: make_series(steps, name) for name in _REWARDS if name in names}
    if "reward" not in reward and "train_reward" in names:
        reward["train_reward"] = make_series(steps, "train_reward")
    drawn = [metric] * (metric in names) + [name for name in _DRAWN if name in names and name != metric]
    counts = await count_rollouts(store)
    health, live = judge(steps), cast(Any, await read_live_state(store))
    if live is not None:  # what live learning did last, or why it took back its last promotion
        health.insert(0, Health("Live learning", "watch" if live.alarm else "good", live.alarm or live.note))
    return {
        "run": describe_run(run),
        "rollouts": counts,
        "total": sum(counts.values()),
        "step": steps[-1].step if steps else None,
        "last": dict(steps[-1].values) if steps else {},
        "reward": reward,
        "has_ledger": any(name.startswith("outcome/") for name in names),
        "health": [each._asdict() for each in health],
        "phases": sum_phases(steps),
        "progress": estimate_left(run, steps, store.now()),
        "metrics": {name: make_series(steps, name) for name in drawn},
        "units": {name: _DRAWN.get(name, ("", ""))[0] for name in drawn},
        "meanings": {name: _DRAWN.get(name, ("", ""))[1] for name in drawn},
        "metric_names": [name for name in names if name not in (*_REWARDS, "train_reward")],
    }
