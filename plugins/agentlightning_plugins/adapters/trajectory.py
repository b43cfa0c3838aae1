"""The adapter ``trajectory``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "adapter",
            "trajectory",
            "agentlightning_plugins.trajectories.trajectory:TraceToTrajectories",
            summary="tokens with masks, calls joined",
        ),
    ]
