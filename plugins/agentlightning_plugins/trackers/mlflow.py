"""Tracker ``mlflow``: a run on an MLflow server, or in a local database."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.event import Event, RunFinished, StepFinished
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.run.tracker import Sample
from agentlightning.types import Run
from agentlightning_plugins.trackers.shared import make_table

_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_FORBIDDEN: Final = re.compile(r"[^\w\-. /:]")
"""Characters that MLflow refuses in names of metrics and parameters, such as ``@`` in ``val_pass@4``."""
_MAX_PARAMS: Final = 100
"""Limit of MLflow for one request."""


@dataclass
class MlflowTracker:
    """Logs metrics by step and the run's configuration. In names, ``_`` replaces characters that MLflow refuses."""

    tracking_uri: str | None = None
    """Such as ``http://host:5000`` or ``sqlite:///mlflow.db``; default is MLFLOW_TRACKING_URI, else MLflow's own."""
    experiment: str = "lightning"
    """The experiment that contains the run; created if it does not exist."""
    _client: Any = field(default=None, init=False)
    _run_id: str = field(default="", init=False)

    def start(self, run: Run, directory: Path | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.tracking_uri)
        known = client.get_experiment_by_name(self.experiment)
        experiment_id = known.experiment_id if known is not None else client.create_experiment(self.experiment)
        self._run_id = client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [Param(_to_name(name), str(value)[:500]) for name, value in run.config.items()]
        for start in range(0, len(params), _MAX_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        self._client = client

    def on_event(self, event: Event) -> None:
        if self._client is None:
            return
        if isinstance(event, StepFinished):
            from mlflow.entities import Metric

            time_ms = int(event.time * 1000)
            metrics = [Metric(_to_name(name), value, time_ms, event.step) for name, value in event.values.items()]
            self._client.log_batch(self._run_id, metrics=metrics)
        elif isinstance(event, RunFinished):
            self._client.set_terminated(self._run_id, status=_STATUS.get(event.status, "FINISHED"))

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes rollouts of a step to ``samples/STEP.json``, in the form of MLflow's tables."""
        if self._client is not None:
            self._client.log_dict(self._run_id, make_table(samples), f"samples/{step}.json")

    def close(self) -> None:
        """Does nothing: every call is sent immediately."""


def _to_name(name: str) -> str:
    return _FORBIDDEN.sub("_", name)


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:MlflowTracker"
    return [Component("tracker", "mlflow", target, extra="mlflow", summary="a server or a local database")]
