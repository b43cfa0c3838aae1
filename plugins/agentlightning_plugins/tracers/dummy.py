"""The tracer ``dummy``, whose class core needs for itself."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracer", "dummy", "agentlightning.tracer.dummy:DummyTracer", summary="records only what the agent emits"
        ),
    ]
