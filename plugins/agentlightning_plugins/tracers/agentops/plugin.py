"""The tracer ``agentops``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracer",
            "agentops",
            "agentlightning_plugins.tracers.agentops.tracer:AgentOpsTracer",
            extra="agentops",
            summary="AgentOps' instrumentation without its cloud",
        ),
    ]
