"""The algorithm ``live``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    learning = "agentlightning_algorithms.live.algorithm:LiveLearning"
    state = "agentlightning_algorithms.shared.live_resources:LiveState"
    return [
        Component("algorithm", "live", learning, summary="learns from the traffic of a service"),
        Component("resource", "live_state", state, summary="state of live learning"),
    ]
