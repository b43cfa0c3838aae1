"""The workers, and the queues and model backends of the runs in progress."""

from __future__ import annotations

from typing import Any, Final

from agentlightning_plugins.dashboard.page import Visit
from agentlightning_plugins.shared.monitoring.fleet import read_backends, read_queue, read_workers
from agentlightning_plugins.shared.monitoring.runs import describe_run, find_newest_runs

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
