"""The tracker ``tensorboard``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracker",
            "tensorboard",
            "agentlightning_plugins.trackers.tensorboard.tracker:TensorBoardTracker",
            extra="tensorboard",
            summary="event files",
        ),
    ]
