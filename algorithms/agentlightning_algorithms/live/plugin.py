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
            summary="learns from what a process serves",
        ),
        Component(
            "resource",
            "live_state",
            "agentlightning_algorithms.live_resources:LiveState",
            summary="where live learning stands",
        ),
    ]
