"""The strategy ``ray``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.strategies.ray.strategy:RayExecutionStrategy"
    return [Component("strategy", "ray", target, extra="ray", summary="runners are Ray actors, on one machine or many")]
