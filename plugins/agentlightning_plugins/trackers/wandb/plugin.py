"""The tracker ``wandb``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracker",
            "wandb",
            "agentlightning_plugins.trackers.wandb.tracker:WandbTracker",
            extra="wandb",
            summary="Weights & Biases",
        ),
    ]
