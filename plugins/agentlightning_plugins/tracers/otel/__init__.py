"""The tracer ``otel``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.shared.opentelemetry.tracer:OtelTracer"
    return [
        Component("tracer", "otel", target, summary="OpenTelemetry, the default"),
        Component("span_reader", "openllmetry", f"{__name__}.openllmetry:READER", summary="OpenLLMetry's model calls"),
    ]
