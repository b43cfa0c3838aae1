"""Workers with their heartbeats, the queue of a run, and the gateway's model backends."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from agentlightning import semconv
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, RolloutStatus, Span, Worker
from agentlightning_plugins.shared.monitoring.runs import count_rollouts

_LOST_S: Final = 60.0
"""A worker without a heartbeat for this long counts as lost if it has work, else as ended."""
_WINDOW_S: Final = 60.0
_RECENT: Final = 500
"""Number of newest rollouts that are searched for recently ended ones."""
_COMPARED: Final = 10_000
"""Number of waiting rollouts whose priorities are compared; a store sorts them at each refresh."""
_STATES: Final = ("busy", "idle", "unknown", "lost", "ended")


async def read_workers(store: LightningStore, limit: int = 500) -> tuple[list[dict[str, Any]], int]:
    """Returns the workers with the latest heartbeats, with ``state`` and ``silent_s``, and the total number."""
    page = await store.query_workers(limit=limit, sort_by="last_heartbeat_time", sort_order="desc")
    now = store.now()
    workers = [_describe_worker(worker, now) for worker in page]
    return sorted(workers, key=lambda worker: _STATES.index(worker["state"])), page.total


async def read_queue(view: LightningStore) -> dict[str, Any]:
    """Returns a run's rollouts by status, and how many are waiting.

    ``oldest`` is the time since which the first one waits, ``priority`` the highest priority among them, None if there
    are too many to compare.
    """
    queued: Sequence[RolloutStatus] = ("queuing", "requeuing")
    waiting = await view.query_rollouts(status_in=queued, limit=1)
    highest = waiting
    if 1 < waiting.total <= _COMPARED:
        highest = await view.query_rollouts(status_in=queued, sort_by="priority", sort_order="desc", limit=1)
    return {
        "rollouts": await count_rollouts(view),
        "waiting": waiting.total,
        "oldest": waiting[0].start_time if waiting else None,
        "priority": highest[0].priority if highest and waiting.total <= _COMPARED else None,
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


def find_state(worker: Worker, now: float) -> str:
    """Returns the state of a worker by the store's clock: its status, or ``lost`` or ``ended``."""
    has_stopped = worker.ended_at is not None or (worker.heartbeat_stats or {}).get("stopped")
    if has_stopped or (worker.status == "unknown" and worker.last_heartbeat_time is not None):
        return "ended"
    if worker.last_heartbeat_time is not None and now - worker.last_heartbeat_time > _LOST_S:
        return "lost" if worker.current_rollout_id else "ended"
    return worker.status


def _describe_worker(worker: Worker, now: float) -> dict[str, Any]:
    silent_s = None if worker.last_heartbeat_time is None else max(0.0, now - worker.last_heartbeat_time)
    state = find_state(worker, now)
    described = {**worker.model_dump(mode="json"), "state": state, "silent_s": silent_s}
    if state in ("ended", "lost"):
        described["heartbeat_stats"] = None  # what it did last is over
    return described


_BACKEND: Final = "agentlightning.gateway.backend"
_COST: Final = "agentlightning.gateway.cost"
"""Attributes that only the gateway's spans have; the attributes of all model calls are in ``semconv``."""
_CHUNK: Final = 100
_MAX_SPANS: Final = 1000
_MAX_CHARS: Final = 4_000_000
"""Size of the newest spans that are read, so that a page loads quickly even in a large run. A limit of time would give
other numbers at each reload."""
_FAILING: Final = 0.1
"""The share of failed calls from which a backend counts as failing."""


async def read_backends(view: LightningStore) -> list[dict[str, Any]]:
    """Returns the backends that a run's newest model calls were sent to, sorted by model and endpoint.

    Each has ``state`` (``ok``, ``failing``: at least a tenth of its calls failed, ``down``: its last three calls
    failed), ``calls``, ``failed``, ``error`` (the latest), ``latency_s``, ``latency_p95_s``, ``first_token_s``,
    ``input_tokens``, ``output_tokens``, ``cost`` (None without a price), ``weight_version``, ``since`` and ``until``
    (the first call and the last one that were counted).
    """
    calls: dict[tuple[str, str], list[Span]] = {}
    read = size = 0
    while read < _MAX_SPANS and size < _MAX_CHARS:
        page = await view.query_spans(None, sort_order="desc", offset=read, limit=_CHUNK)
        for span in page:
            size += sum(len(value) for value in span.attributes.values() if isinstance(value, str | list | tuple))
            backend = span.attributes.get(_BACKEND)
            if isinstance(backend, str) and semconv.GATEWAY_COMPLETE in span.attributes and span.end_time is not None:
                key = (str(span.attributes.get(semconv.GEN_AI_REQUEST_MODEL, "")), backend)
                calls.setdefault(key, []).append(span)
        read += len(page)
        if len(page) < _CHUNK:
            break
    return [_describe(model, endpoint, spans) for (model, endpoint), spans in sorted(calls.items())]


def _describe(model: str, endpoint: str, spans: Sequence[Span]) -> dict[str, Any]:
    """Summarizes the calls of a backend, the newest first."""
    failures = [span for span in spans if span.status.status_code == "ERROR"]
    seconds = [span.end_time - span.start_time for span in spans if span.start_time is not None and span.end_time]
    first = _numbers(spans, semconv.GEN_AI_TIME_TO_FIRST_CHUNK)
    costs = _numbers(spans, _COST)
    versions = _numbers(spans, semconv.WEIGHT_VERSION)
    state = "failing" if len(failures) >= max(1.0, _FAILING * len(spans)) else "ok"
    if len(spans) >= 3 and all(span.status.status_code == "ERROR" for span in spans[:3]):
        state = "down"
    return {
        "model": model,
        "endpoint": endpoint,
        "provider": spans[0].attributes.get(semconv.GEN_AI_PROVIDER_NAME),
        "state": state,
        "calls": len(spans),
        "failed": len(failures),
        "error": failures[0].status.description if failures else None,
        "latency_s": statistics.median(seconds) if seconds else None,
        "latency_p95_s": sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        "first_token_s": statistics.median(first) if first else None,
        "input_tokens": int(sum(_numbers(spans, semconv.GEN_AI_INPUT_TOKENS))),
        "output_tokens": int(sum(_numbers(spans, semconv.GEN_AI_OUTPUT_TOKENS))),
        "cost": math.fsum(costs) if costs else None,
        "weight_version": int(versions[0]) if versions else None,
        "since": min((span.start_time for span in spans if span.start_time is not None), default=None),
        "until": max((span.end_time for span in spans if span.end_time is not None), default=None),
    }


def _numbers(spans: Sequence[Span], name: str) -> list[float]:
    values = (span.attributes.get(name) for span in spans)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
