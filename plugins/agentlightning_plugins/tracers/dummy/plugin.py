"""The tracer ``dummy``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.dummy.tracer:DummyTracer"
    return [Component("tracer", "dummy", target, summary="records only what the agent emits")]
