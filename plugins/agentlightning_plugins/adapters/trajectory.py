"""The adapter ``trajectory``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.shared.trajectories:TraceToTrajectories"
    return [Component("adapter", "trajectory", target, summary="tokens with masks, calls joined")]
