"""The tracer ``otel``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracer",
            "otel",
            "agentlightning_plugins.tracers.opentelemetry.tracer:OtelTracer",
            summary="OpenTelemetry, the default",
        ),
    ]
