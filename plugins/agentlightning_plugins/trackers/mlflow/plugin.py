"""The tracker ``mlflow``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "tracker",
            "mlflow",
            "agentlightning_plugins.trackers.mlflow.tracker:MlflowTracker",
            extra="mlflow",
            summary="a server or a local database",
        ),
    ]
