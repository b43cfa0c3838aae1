"""Workers with their heartbeats, and the queue of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Worker
from agentlightning_plugins.shared.monitoring.runs import count_rollouts

_LOST_S: Final = 60.0
"""A worker without a heartbeat for this long counts as lost if it has work, else as ended."""
_WINDOW_S: Final = 60.0
_RECENT: Final = 500
"""Number of newest rollouts that are searched for recently ended ones."""
_STATES: Final = ("busy", "idle", "unknown", "lost", "ended")


async def read_workers(store: LightningStore, limit: int = 500) -> tuple[list[dict[str, Any]], int]:
    """Returns the workers with the latest heartbeats, with ``state`` and ``silent_s``, and the total number."""
    page = await store.query_workers(limit=limit, sort_by="last_heartbeat_time", sort_order="desc")
    now = store.now()
    workers = [_describe_worker(worker, now) for worker in page]
    return sorted(workers, key=lambda worker: _STATES.index(worker["state"])), page.total


async def read_queue(view: LightningStore) -> dict[str, Any]:
    """Returns a run's rollouts by status, how many are waiting, and since when the first one waits (``oldest``)."""
    waiting = await view.query_rollouts(status_in=["queuing", "requeuing"], limit=1)
    return {
        "rollouts": await count_rollouts(view),
        "waiting": waiting.total,
        "oldest": waiting[0].start_time if waiting else None,
    }


async def read_activity(view: LightningStore) -> dict[str, Any]:
    """Returns how many rollouts of a run ended in the last minute, and the errors of the newest failed rollouts.

    ``ended`` and ``failed`` are counts of the last minute; ``errors`` has the number of rollouts with each error and
    its latest message, the most frequent error first.
    """
    since = view.now() - _WINDOW_S
    newest = await view.query_rollouts(sort_order="desc", limit=_RECENT)
    ended = [rollout for rollout in newest if rollout.end_time is not None and rollout.end_time >= since]
    counts: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for rollout in newest:
        error = rollout.attempt.error if isinstance(rollout, AttemptedRollout) else None
        if rollout.status == "failed" and error is not None:
            counts[error.type] += 1
            messages.setdefault(error.type, error.message)
    return {
        "window_s": _WINDOW_S,
        "ended": len(ended),
        "failed": sum(rollout.status == "failed" for rollout in ended),
        "searched": len(newest),
        "errors": [{"type": name, "count": count, "message": messages[name]} for name, count in counts.most_common(10)],
    }


def _describe_worker(worker: Worker, now: float) -> dict[str, Any]:
    silent_s = None if worker.last_heartbeat_time is None else max(0.0, now - worker.last_heartbeat_time)
    state: str = worker.status
    if worker.ended_at is not None:
        state = "ended"
    elif silent_s is not None and silent_s > _LOST_S:
        state = "lost" if worker.current_rollout_id else "ended"
    return {**worker.model_dump(mode="json"), "state": state, "silent_s": silent_s}
