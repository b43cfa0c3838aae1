"""How a gateway does, as JSON: what ``agl gateway status`` shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backends.backend import ModelTable
from agentlightning_plugins.gateway.limits.admission import Admission
from agentlightning_plugins.gateway.recording.call import Call
from agentlightning_plugins.gateway.recording.metric import count_by_backend


def describe(models: ModelTable, admission: Admission, running: Iterable[Call], writer: SpanWriter) -> dict[str, Any]:
    """The state of a gateway; no keys in it."""
    counts = count_by_backend(running)
    return {
        "backends": [
            {
                "model": backend.model,
                "endpoint": backend.endpoint,
                "served_model": backend.served_model,
                "provider": backend.provider.name,
                "weight": backend.weight,
                "up": backend.is_up,
                "failure": backend.failure,
                "in_flight": counts[backend.identity],
            }
            for backend in models.backends
        ],
        "paused": admission.is_paused,
        "in_flight": admission.in_flight,
        "waiting": admission.waiting,
        "weight_version": admission.weight_version,
        "spans_queued": writer.queued,
        "spans_lost": writer.lost,
    }
