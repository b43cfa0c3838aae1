"""The state of a store at one moment, as ``agl top`` shows it."""

from __future__ import annotations

from typing import Any, Final

from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.monitoring.fleet import read_activity, read_backends, read_queue, read_workers
from agentlightning_plugins.shared.monitoring.metrics import estimate_left, judge, read_metrics
from agentlightning_plugins.shared.monitoring.runs import describe_run, find_curve, find_newest_runs, find_run
from agentlightning_plugins.shared.terminal import found

_MAX_WORKERS: Final = 50
_STEPS: Final = 60


async def read_snapshot(store: LightningStore, run_id: str | None) -> dict[str, Any]:
    """Reads the state of a run and the workers of its store, as plain JSON values.

    Args:
        store: any view of the store.
        run_id: the run; None selects the newest run in progress, or else the newest run.

    Raises:
        NotFoundError: the store has no run ``run_id``.
    """
    if run_id is not None:
        run = found(await find_run(store.with_run(run_id)), "run", run_id)
    else:
        runs = await find_newest_runs(store)
        if not runs:
            return {"time": store.now(), "run": None, **await _read_fleet(store)}
        run = runs[0]
    view = store.with_run(run.run_id)
    steps = await read_metrics(view, _STEPS)
    last = {name: value for step in steps[-5:] for name, value in step.values.items()}
    curve = find_curve(steps)
    return {
        "time": store.now(),
        "run": describe_run(run),
        "step": steps[-1].step if steps else None,
        "progress": estimate_left(run, steps, store.now()),
        "reward": curve[-1]["value"] if curve else None,
        "val_reward": last.get("val_reward"),
        "curve": [point["value"] for point in curve],
        "tokens_per_s": last.get("tokens_per_s", last.get("sample_tokens_per_s")),
        "seconds_per_step": last.get("seconds"),
        "health": [health._asdict() for health in judge(steps) if health.level != "good"],
        **await read_queue(view),
        "activity": await read_activity(view),
        "backends": await read_backends(view),
        **await _read_fleet(store),
    }


async def _read_fleet(store: LightningStore) -> dict[str, Any]:
    workers, total = await read_workers(store, _MAX_WORKERS)
    return {"workers": workers, "n_workers": total}
