"""The tracer ``openinference``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracer",
            "openinference",
            "agentlightning_plugins.tracers.openinference.tracer:OpenInferenceTracer",
            extra="openinference",
            summary="OpenInference's instrumentation",
        ),
    ]
