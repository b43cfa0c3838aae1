"""The tracker ``mlflow``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.mlflow.tracker:MlflowTracker"
    return [Component("tracker", "mlflow", target, extra="mlflow", summary="a server or a local database")]
