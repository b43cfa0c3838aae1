"""The algorithm ``evaluation``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_algorithms.evaluation.algorithm:Evaluation"
    return [Component("algorithm", "evaluation", target, summary="measures an agent, without training")]
