"""The adapter ``transition``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "adapter",
            "transition",
            "agentlightning_plugins.adapters.transition.adapter:TraceToTransitions",
            summary="state, action, reward",
        ),
    ]
