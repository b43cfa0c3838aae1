"""Tracker ``wandb``: a run on Weights & Biases, or in a directory with ``mode='offline'``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentlightning.event import Event, RunFinished, StepFinished
from agentlightning.frozen import thaw
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.run.tracker import Sample
from agentlightning.types import Run
from agentlightning_plugins.trackers.shared import make_table


@dataclass
class WandbTracker:
    """Logs metrics by step and the run's configuration. The key is WANDB_API_KEY."""

    project: str = "lightning"
    """The project that contains the run."""
    entity: str | None = None
    """User or team; None means the owner of the key."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Default is WANDB_MODE, else ``online``."""
    _run: Any = field(default=None, init=False)

    def start(self, run: Run, directory: Path | None) -> None:
        import wandb

        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {"project": self.project, "entity": self.entity, "mode": self.mode}
        self._run = wandb.init(**settings, name=run.name, dir=directory, config=thaw(run.config))

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._run.log(dict(event.values), step=event.step)
        elif isinstance(event, RunFinished):
            self._run.summary["status"] = event.status

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Logs rollouts of a step as the table ``samples``."""
        import wandb

        self._run.log({"samples": wandb.Table(**make_table(samples))}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


@hookimpl
def components() -> list[Component]:
    return [Component("tracker", "wandb", f"{__name__}:WandbTracker", extra="wandb", summary="Weights & Biases")]
