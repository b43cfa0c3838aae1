"""The state of the gateway's backends, derived from the spans of the newest model calls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from agentlightning import semconv
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Span

_BACKEND: Final = "agentlightning.gateway.backend"
_COST: Final = "agentlightning.gateway.cost"
"""Attributes that only the gateway's spans have; the attributes of all model calls are in ``semconv``."""
_CHUNK: Final = 100
_MAX_SPANS: Final = 1000
_BUDGET_S: Final = 0.08
"""Time limit for reading spans, so that a page loads quickly even in a large run."""
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
    read, deadline = 0, time.monotonic() + _BUDGET_S
    while read < _MAX_SPANS and (not read or time.monotonic() < deadline):
        page = await view.query_spans(None, sort_order="desc", offset=read, limit=_CHUNK)
        for span in page:
            backend = span.attributes.get(_BACKEND)
            if isinstance(backend, str) and semconv.is_gateway_call(span) and span.end_time is not None:
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
