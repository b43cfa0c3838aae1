"""The tracker ``jsonl``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.jsonl.tracker:JsonlTracker"
    return [Component("tracker", "jsonl", target, summary="metrics.jsonl in the run's directory")]
