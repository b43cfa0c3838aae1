"""What the algorithm root offers."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    root = "agentlightning_algorithms"
    return [
        Component("algorithm", "baseline", f"{root}.baseline:Baseline", summary="runs the agent over the data"),
        Component("algorithm", "evaluation", f"{root}.evaluation:Evaluation", summary="says how good an agent is"),
        Component(
            "algorithm", "grpo", f"{root}.grpo.algorithm:GRPO", extra="grpo", summary="trains weights on one machine"
        ),
    ]
