"""The tracker ``console``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracker",
            "console",
            "agentlightning_plugins.trackers.console.tracker:ConsoleTracker",
            summary="live at the terminal",
        ),
    ]
