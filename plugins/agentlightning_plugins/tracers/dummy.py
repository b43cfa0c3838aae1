"""The tracer ``dummy``. Its class is part of core, which uses it itself."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning.tracer.dummy:DummyTracer"
    return [Component("tracer", "dummy", target, summary="records only what the agent emits")]
