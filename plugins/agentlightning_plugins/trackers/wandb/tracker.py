"""Tracker ``wandb``: a run at Weights & Biases, or in a folder with ``mode='offline'``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import wandb

from agentlightning.event import Event, RunFinished, StepFinished
from agentlightning.frozen import thaw
from agentlightning.types import Run


class WandbTracker:
    """Logs metrics by step and the run's configuration. The key is WANDB_API_KEY."""

    def __init__(
        self,
        project: str = "lightning",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        """Chooses the project.

        Args:
            project: where the run appears.
            entity: user or team; None is the key's own.
            mode: None asks WANDB_MODE, else ``online``.
        """
        self._project = project
        self._entity = entity
        self._mode = mode
        self._run: Any = None

    def start(self, run: Run, directory: Path | None) -> None:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            name=run.name,
            dir=directory,
            config=thaw(run.config),
        )

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._run.log(dict(event.values), step=event.step)
        elif isinstance(event, RunFinished):
            self._run.summary["status"] = event.status

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
