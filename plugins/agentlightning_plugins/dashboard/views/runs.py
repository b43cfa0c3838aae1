"""The list of runs, and one run."""

from __future__ import annotations

from typing import Any, Final

from agentlightning.types import Run
from agentlightning_plugins.dashboard.page import Visit
from agentlightning_plugins.dashboard.views.rollouts import describe_rollout
from agentlightning_plugins.monitoring import metrics as numbers
from agentlightning_plugins.monitoring.runs import count_rollouts, describe_run, find_run

_RUNS_OF_PAGE: Final = 20
_CURVE_STEPS: Final = 100
_FIRST_CHARTS: Final = (
    "best_score", "beam_score_mean", "tokens",
    "entropy", "response_length", "success_rate", "grad_norm", "logprob_gap_max", "tokens_per_s",
)  # fmt: skip
_CHARTED: Final = frozenset({"reward", "val_reward", "test_reward", "train_reward"})


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
        steps = await numbers.read_metrics(view, _CURVE_STEPS)
        series = numbers.make_series(steps, "reward") or numbers.make_series(steps, "val_reward")
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
    run = await find_run(store) or Run(run_id=store.run_id, name=store.run_id)
    steps = await numbers.read_metrics(store)
    names = list(dict.fromkeys(name for each in steps for name in each.values))
    reward: dict[str, list[dict[str, float]]] = {
        name: numbers.make_series(steps, name) for name in ("reward", "val_reward", "test_reward") if name in names
    }
    if "reward" not in reward and "train_reward" in names:
        reward["train_reward"] = numbers.make_series(steps, "train_reward")
    chosen = visit.query.get("metric", "")
    shown = [chosen] * (chosen in names) + [name for name in _FIRST_CHARTS if name in names and name != chosen]
    counts = await count_rollouts(store)
    newest = await store.query_rollouts(sort_order="desc", limit=8)
    return {
        "run": describe_run(run),
        "rollouts": counts,
        "total": sum(counts.values()),
        "step": steps[-1].step if steps else None,
        "last": dict(steps[-1].values) if steps else {},
        "reward": reward,
        "has_ledger": any(name.startswith("outcome/") for name in names),
        "health": [health._asdict() for health in numbers.judge(steps)],
        "phases": numbers.sum_phases(steps),
        "progress": numbers.estimate_left(run, steps, store.now()),
        "metrics": {name: numbers.make_series(steps, name) for name in shown},
        "metric_names": [name for name in names if name not in _CHARTED],
        "newest": [describe_rollout(rollout) for rollout in newest],
    }
