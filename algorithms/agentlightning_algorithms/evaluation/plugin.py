"""The algorithm ``evaluation``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "evaluation",
            "agentlightning_algorithms.evaluation.algorithm:Evaluation",
            summary="says how good an agent is",
        ),
    ]
