"""The tracer ``agentops``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.agentops.tracer:AgentOpsTracer"
    summary = "AgentOps' instrumentation without its cloud"
    return [
        Component("tracer", "agentops", target, extra="agentops", summary=summary),
        Component("span_reader", "agentops", f"{__name__}.spans:READER", summary="AgentOps' spans"),
    ]
