"""The algorithm ``baseline``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_algorithms.baseline.algorithm:Baseline"
    return [Component("algorithm", "baseline", target, summary="runs the agent over the data")]
