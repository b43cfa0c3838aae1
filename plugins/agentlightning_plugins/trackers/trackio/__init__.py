"""The tracker ``trackio``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.trackio.tracker:TrackioTracker"
    return [Component("tracker", "trackio", target, extra="trackio", summary="a local dashboard")]
