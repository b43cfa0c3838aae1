"""The algorithm ``baseline``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "baseline",
            "agentlightning_algorithms.baseline.algorithm:Baseline",
            summary="runs the agent over the data",
        ),
    ]
