"""Tracers: record what an agent does as spans of its attempt."""

from typing import TYPE_CHECKING

from agentlightning.facade import resolve_lazily

if TYPE_CHECKING:
    from agentlightning.tracer.dummy import DummyTracer as DummyTracer
    from agentlightning.tracer.tracer import OpenSpan as OpenSpan
    from agentlightning.tracer.tracer import Trace as Trace
    from agentlightning.tracer.tracer import Tracer as Tracer
    from agentlightning.tracer.tracer import get_active_tracer as get_active_tracer
    from agentlightning_plugins.agentops_tracer import AgentOpsTracer as AgentOpsTracer
    from agentlightning_plugins.openinference_tracer import OpenInferenceTracer as OpenInferenceTracer
    from agentlightning_plugins.otel_tracer import OtelTracer as OtelTracer

__all__ = [
    "AgentOpsTracer",
    "DummyTracer",
    "OpenInferenceTracer",
    "OpenSpan",
    "OtelTracer",
    "Trace",
    "Tracer",
    "get_active_tracer",
]

__getattr__ = resolve_lazily(
    __name__,
    {
        "AgentOpsTracer": ("tracer", "agentops"),
        "DummyTracer": "agentlightning.tracer.dummy",
        "OpenInferenceTracer": ("tracer", "openinference"),
        "OpenSpan": "agentlightning.tracer.tracer",
        "OtelTracer": ("tracer", "otel"),
        "Trace": "agentlightning.tracer.tracer",
        "Tracer": "agentlightning.tracer.tracer",
        "get_active_tracer": "agentlightning.tracer.tracer",
    },
)
