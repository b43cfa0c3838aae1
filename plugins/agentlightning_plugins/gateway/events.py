"""Events that a program written for Agent Lightning 1.0 posts to ``AGL_EVENT_URL``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.errors import ConfigError
from agentlightning.records import Span
from agentlightning.semconv import distrust
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.dialects.dialect import CallRefused

EVENTS: Final = "events"
"""The path, below an attempt."""
MAX_BYTES: Final = 1_000_000


def read_event(body: Any, attempt: AttemptKey) -> Span:
    """Returns the span of an event ``{"event_type": ..., "data": {...}}``: a reward, or an annotation of another type.

    Raises CallRefused if the body is no event, or its reward is not a number.
    """
    kind, data = (body.get("event_type"), body.get("data")) if isinstance(body, Mapping) else (None, None)
    if not (isinstance(kind, str) and kind and isinstance(data, Mapping)):
        raise CallRefused(400, 'an event is {"event_type": TEXT, "data": {...}}', "invalid_request")
    try:
        if kind == "reward":
            span = emit_reward(data.get("value"), attributes={"event": data}, propagate=False)  # type: ignore[arg-type] # it checks
        else:
            span = emit_annotation({"event_type": kind, "event": data}, propagate=False)
    except ConfigError as error:
        raise CallRefused(400, f"event {kind!r}: {error}", "invalid_request") from None
    rollout_id, attempt_id = attempt
    now = time.time()
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": os.urandom(16).hex()}
    return distrust(span.model_copy(update={**ids, "start_time": now, "end_time": now}))
