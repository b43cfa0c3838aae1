"""The tracker ``jsonl``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracker",
            "jsonl",
            "agentlightning_plugins.trackers.jsonl.tracker:JsonlTracker",
            summary="metrics.jsonl in the run's directory",
        ),
    ]
