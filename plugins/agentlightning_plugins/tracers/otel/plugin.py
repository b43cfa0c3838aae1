"""The tracer ``otel``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.opentelemetry.tracer:OtelTracer"
    return [Component("tracer", "otel", target, summary="OpenTelemetry, the default")]
