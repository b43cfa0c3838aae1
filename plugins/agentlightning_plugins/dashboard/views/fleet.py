"""The workers and the queue of every run that is under way."""

from __future__ import annotations

import time
from typing import Any, Final

from agentlightning.types import Worker
from agentlightning_plugins.dashboard.page import Visit
from agentlightning_plugins.dashboard.views.runs import count_rollouts, describe_run, find_run

_MAX_WORKERS: Final = 500
_MAX_RUNS: Final = 10
_LOST_S: Final = 60.0
"""A worker without a heartbeat for this long is shown as lost."""


async def show_fleet(visit: Visit) -> dict[str, Any]:
    """Workers with their heartbeats, queues, and the counts of the store."""
    store = visit.store
    page = await store.query_workers(limit=_MAX_WORKERS, sort_by="last_heartbeat_time", sort_order="desc")
    workers = [_describe_worker(worker) for worker in page]
    workers.sort(key=lambda worker: ("busy", "idle", "unknown", "lost", "ended").index(worker["state"]))
    total = (await store.query_runs(limit=0)).total
    runs = [run for run in await store.query_runs(offset=max(0, total - 50)) if run.status == "running"][::-1]
    if all(run.run_id != store.run_id for run in runs) and (own := await find_run(store)) is not None:
        runs += [own] if own.status == "running" else []
    queues = []
    for run in runs[:_MAX_RUNS]:
        view = store.with_run(run.run_id)
        waiting = await view.query_rollouts(status_in=["queuing", "requeuing"], limit=1)
        queues.append(
            {
                **describe_run(run),
                "rollouts": await count_rollouts(view),
                "waiting": waiting.total,
                "oldest": waiting[0].start_time if waiting else None,
            }
        )
    live = runs[0].run_id if runs else None
    return {
        "live_run": live,
        "workers": workers,
        "total": page.total,
        "queues": queues,
        "statistics": await store.statistics(),
    }


def _describe_worker(worker: Worker) -> dict[str, Any]:
    silent_s = None if worker.last_heartbeat_time is None else max(0.0, time.time() - worker.last_heartbeat_time)
    state: str = worker.status
    if worker.ended_at is not None:
        state = "ended"
    elif silent_s is not None and silent_s > _LOST_S:
        state = "lost"
    return {**worker.model_dump(mode="json"), "state": state, "silent_s": silent_s}
