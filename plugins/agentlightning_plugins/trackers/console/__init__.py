"""The tracker ``console``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.console.tracker:ConsoleTracker"
    return [Component("tracker", "console", target, summary="live at the terminal")]
