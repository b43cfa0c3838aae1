"""The list of runs, one run, two runs side by side, and the workers and queues of the runs in progress."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from agentlightning.reward import count_failed, find_final_reward
from agentlightning.store.check import check_run_id
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Metrics, Rollout
from agentlightning_plugins.dashboard.rollouts import describe_rollout
from agentlightning_plugins.dashboard.visit import Visit
from agentlightning_plugins.shared.monitoring.evaluation import (
    compare_first_and_last,
    describe_outcome,
    find_published_prompts,
    read_candidates,
)
from agentlightning_plugins.shared.monitoring.fleet import read_activity, read_backends, read_queue, read_workers
from agentlightning_plugins.shared.monitoring.metrics import make_series, read_metrics
from agentlightning_plugins.shared.monitoring.runs import (
    count_rollouts,
    describe_run,
    find_curve,
    find_newest_runs,
    find_run,
    read_result,
)
from agentlightning_plugins.shared.rendering.text import dump, find_difference, show_task
from agentlightning_plugins.shared.statistics.interval import paired_p_value

_RUNS_OF_PAGE: Final = 20
_MAX_COMPARED: Final = 1_000
"""Number of rollouts of a step that a page reads to compare evaluations; reports read all."""
_CURVE_STEPS: Final = 100


async def list_runs(visit: Visit) -> dict[str, Any]:
    """Returns the newest runs, with rollouts by status and the reward curve."""
    store = visit.store
    total = (await store.query_runs(limit=0)).total
    first = visit.number("before", total)
    start = max(0, first - _RUNS_OF_PAGE)
    runs = list(await store.query_runs(offset=start, limit=min(first, total) - start))[::-1] if first > 0 else []
    if first >= total and all(run.run_id != store.run_id for run in runs):
        own = await find_run(store)
        runs += [own] if own is not None else []
    rows = []
    for run in runs:
        view = store.with_run(run.run_id)
        counts = await count_rollouts(view)
        steps = await read_metrics(view, _CURVE_STEPS)
        series = find_curve(steps)
        rows.append(
            {
                **describe_run(run),
                "rollouts": counts,
                "total": sum(counts.values()),
                "step": steps[-1].step if steps else None,
                "reward": series[-1]["value"] if series else None,
                "val_reward": next((point["value"] for point in make_series(steps, "val_reward")[-1:]), None),
                "curve": [point["value"] for point in series],
            }
        )
    live = next((row["run_id"] for row in rows if row["status"] == "running"), None)
    return {"live_run": live, "runs": rows, "total": total, "next": start or None}


async def show_run(visit: Visit) -> dict[str, Any]:
    """Returns one run: what it achieved, reward, health, time by phase, metrics, errors, and the newest rollouts."""
    store = visit.run_store
    newest = await store.query_rollouts(sort_order="desc", limit=8)
    activity = await read_activity(store)
    return {
        **await read_result(store, visit.query.get("metric", "")),
        "outcome": await _read_outcome(store),
        "errors": activity["errors"],
        "errors_of": activity["searched"],
        "newest": [describe_rollout(rollout) for rollout in newest],
    }


async def _read_outcome(store: LightningStore) -> dict[str, Any]:
    """Returns what a run achieved, as its report shows it."""
    metrics, latest = (await store.query_metrics()).items, await store.get_latest_resources()
    is_search = any("candidates" in each.values for each in metrics)
    candidates = await read_candidates(store) if is_search else []
    resources = {} if latest is None else latest.resources
    texts = {name: getattr(each, "template", "") for name, each in resources.items()}
    published = find_published_prompts(candidates, texts)
    found = await compare_first_and_last(store, metrics, candidates, published, transcripts=False, most=_MAX_COMPARED)
    return await asyncio.to_thread(describe_outcome, found, metrics, published)


_MAX_RUNS: Final = 10
_MAX_RUNS_OF_BACKENDS: Final = 2


async def show_fleet(visit: Visit) -> dict[str, Any]:
    """Returns workers with their heartbeats, queues, backends of the gateway, and the store's statistics."""
    store = visit.store
    workers, total = await read_workers(store)
    runs = await find_newest_runs(store)
    live = [run for run in runs if run.status == "running"]
    return {
        "live_run": live[0].run_id if live else None,
        "workers": workers,
        "total": total,
        "queues": [{**describe_run(run), **await read_queue(store.with_run(run.run_id))} for run in live[:_MAX_RUNS]],
        "backends": [
            {**backend, "run_id": run.run_id}
            for run in (live or runs[:1])[:_MAX_RUNS_OF_BACKENDS]
            for backend in await read_backends(store.with_run(run.run_id))
        ],
        "statistics": await store.statistics(),
    }


_MAX_CHOICES: Final = 100


async def compare(visit: Visit) -> dict[str, Any]:
    """Compares the runs ``a`` and ``b`` of the query, or else the newest two runs."""
    store = visit.store
    total = (await store.query_runs(limit=0)).total
    known = [run.run_id for run in await store.query_runs(offset=max(0, total - _MAX_CHOICES))][::-1]
    chosen = [check_run_id(visit.query[name]) for name in ("a", "b") if visit.query.get(name)]
    if len(chosen) < 2:
        chosen = known[:2][::-1]
    sides, recorded = [], []
    for run_id in chosen:
        view = store.with_run(run_id)
        steps = await read_metrics(view)
        recorded.append((view, steps))
        last: dict[str, float] = {}
        for each in steps:
            last |= each.values
        run = await find_run(view)
        curves = {name: make_series(steps, name) for name in ("reward", "val_reward")}
        described: dict[str, Any] = {"name": run_id, "status": "unknown", "config": {}, "algorithm": ""}
        described |= describe_run(run) if run is not None else {}
        sides.append({**described, "run_id": run_id, "last": last, "curves": curves})
    names = sorted({name for side in sides for name in side["last"]}) if len(sides) == 2 else []
    texts = [dump(side["config"]) for side in sides]
    return {
        "choices": known,
        "runs": sides,
        "metrics": [{"name": name, "values": [side["last"].get(name) for side in sides]} for name in names],
        "tasks": await compare_tasks(recorded) if len(sides) == 2 else None,
        "configuration": await asyncio.to_thread(find_difference, *texts) if len(sides) == 2 else [],
    }


_MAX_ROLLOUTS: Final = 400
"""Number of the newest rollouts that are searched for the validation of an algorithm without steps."""
_MAX_FLIPPED: Final = 50
_SOLVED: Final = 0.5
"""Minimum mean reward of a solved task; a task flipped if only one of the runs solved it."""


async def compare_tasks(sides: Sequence[tuple[LightningStore, Sequence[Metrics]]]) -> dict[str, Any] | None:
    """Compares two runs by the rollouts of their last validations; None if they share no task.

    A failure counts as 0, or as the lowest reward of both runs if that is negative.
    """
    one, other = [await _read_rewards(store, steps) for store, steps in sides]
    shared = sorted(one.keys() & other.keys())
    if not shared:
        return None
    failed = count_failed(reward for side in (one, other) for task in shared for reward in side[task][0])

    def mean(rewards: Sequence[float | None]) -> float:
        return statistics.fmean(failed if reward is None else reward for reward in rewards)

    means = [(task, mean(one[task][0]), mean(other[task][0])) for task in shared]
    differences = [after - before for _, before, after in means]
    flipped: list[dict[str, Any]] = [
        {
            "task": show_task(json.loads(task))[:400],
            "rewards": [before, after],
            "rollouts": [one[task][1], other[task][1]],
        }
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


async def _read_rewards(store: LightningStore, steps: Sequence[Metrics]) -> dict[str, tuple[list[float | None], str]]:
    """Returns the rewards of each task and the id of one of its rollouts, by task as JSON; None is a failure."""
    step = next((each.step for each in reversed(steps) if "val_reward" in each.values), None)
    found: Iterable[Rollout] = ()
    if step is not None:
        found = await store.query_rollouts(  # includes training rollouts
            metadata={"step": step}, sort_order="desc", limit=_MAX_COMPARED
        )
    if not any(rollout.mode == "val" for rollout in found):  # an algorithm that records no steps
        found = await store.query_rollouts(sort_order="desc", limit=_MAX_ROLLOUTS)
    rewards: dict[str, tuple[list[float | None], str]] = {}
    for rollout in found:
        reward = find_final_reward((), rollout) if rollout.status == "succeeded" else None
        if rollout.mode == "val" and (reward is not None or rollout.status == "failed"):
            task = json.dumps(rollout.input, sort_keys=True, ensure_ascii=False, default=str)
            rewards.setdefault(task, ([], rollout.rollout_id))[0].append(reward)
    return rewards
