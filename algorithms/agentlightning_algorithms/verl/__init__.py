"""The algorithm ``verl``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_algorithms.verl.algorithm:VERL"
    return [Component("algorithm", "verl", target, extra="verl", summary="trains weights on many GPUs")]
