"""The list of runs, and one run."""

from __future__ import annotations

from typing import Any, Final

from agentlightning_plugins.dashboard.page import Visit
from agentlightning_plugins.dashboard.views.rollouts import describe_rollout
from agentlightning_plugins.shared.monitoring.metrics import read_metrics
from agentlightning_plugins.shared.monitoring.runs import (
    count_rollouts,
    describe_run,
    find_curve,
    find_run,
    read_result,
)

_RUNS_OF_PAGE: Final = 20
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
                "best_val": max(
                    (each.values["val_reward"] for each in steps if "val_reward" in each.values), default=None
                ),
                "curve": [point["value"] for point in series],
            }
        )
    live = next((row["run_id"] for row in rows if row["status"] == "running"), None)
    return {"live_run": live, "runs": rows, "total": total, "next": start or None}


async def show_run(visit: Visit) -> dict[str, Any]:
    """Returns one run: reward, health, time by phase, all metrics, and the newest rollouts."""
    store = visit.run_store
    newest = await store.query_rollouts(sort_order="desc", limit=8)
    return {
        **await read_result(store, visit.query.get("metric", "")),
        "newest": [describe_rollout(rollout) for rollout in newest],
    }
