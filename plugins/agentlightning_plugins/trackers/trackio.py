"""Tracker ``trackio``: a local dashboard, ``trackio show``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.event import Event, StepFinished
from agentlightning.frozen import thaw
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.run.tracker import Sample
from agentlightning.types import Run
from agentlightning_plugins.trackers.shared import make_table


class TrackioTracker:
    """Logs metrics by step and the run's configuration to Trackio's local database."""

    def __init__(self, project: str = "lightning") -> None:
        """Sets the project that contains the run."""
        self._project = project
        self._run: Any = None

    def start(self, run: Run, directory: Path | None) -> None:
        import trackio

        self._run = trackio.init(
            project=self._project, name=run.name, config=thaw(run.config), resume="allow", embed=False
        )

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._run.log(dict(event.values), step=event.step)

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs rollouts of a step as the table ``samples``."""
        import trackio

        self._run.log({"samples": trackio.Table(**make_table(samples))}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


@hookimpl
def components() -> list[Component]:
    return [Component("tracker", "trackio", f"{__name__}:TrackioTracker", extra="trackio", summary="a local dashboard")]
