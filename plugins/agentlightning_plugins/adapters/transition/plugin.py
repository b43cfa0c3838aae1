"""The adapter ``transition``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.adapters.transition.adapter:TraceToTransitions"
    return [Component("adapter", "transition", target, summary="state, action, reward")]
