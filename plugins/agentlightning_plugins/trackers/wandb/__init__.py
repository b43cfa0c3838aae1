"""The tracker ``wandb``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.wandb.tracker:WandbTracker"
    return [Component("tracker", "wandb", target, extra="wandb", summary="Weights & Biases")]
