"""The algorithm ``live``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "algorithm",
            "live",
            "agentlightning_algorithms.live.algorithm:LiveLearning",
            summary="learns from the traffic of a service",
        ),
        Component(
            "resource",
            "live_state",
            "agentlightning_algorithms.shared.live_resources:LiveState",
            summary="state of live learning",
        ),
    ]
