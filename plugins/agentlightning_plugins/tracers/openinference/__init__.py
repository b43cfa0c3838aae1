"""The tracer ``openinference``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.openinference.tracer:OpenInferenceTracer"
    summary = "OpenInference's instrumentation"
    return [
        Component("tracer", "openinference", target, extra="openinference", summary=summary),
        Component("span_reader", "openinference", f"{__name__}.spans:READER", summary="OpenInference's spans"),
    ]
