"""The tracker ``tensorboard``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.tensorboard.tracker:TensorBoardTracker"
    return [Component("tracker", "tensorboard", target, extra="tensorboard", summary="event files")]
