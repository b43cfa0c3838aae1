"""The tracker ``trackio``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracker",
            "trackio",
            "agentlightning_plugins.trackers.trackio.tracker:TrackioTracker",
            extra="trackio",
            summary="a local dashboard",
        ),
    ]
