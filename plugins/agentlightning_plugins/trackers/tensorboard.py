"""Tracker ``tensorboard``: every metric of every step as a scalar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.event import Event, StepFinished
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.types import Run


class TensorBoardTracker:
    """Writes event files for ``tensorboard --logdir``."""

    def __init__(self, log_dir: str | Path | None = None) -> None:
        """Sets the directory; default is ``tensorboard`` in the run's directory."""
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._writer: Any = None

    def start(self, run: Run, directory: Path | None) -> None:
        from tensorboard.summary import Writer

        folder = self._log_dir or (directory and directory / "tensorboard")
        if folder is None:
            raise ConfigError("the tracker 'tensorboard' needs a log_dir or a run_dir to write to")
        self._writer = Writer(str(folder))

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished) and self._writer is not None:
            for name, value in event.values.items():
                self._writer.add_scalar(name, value, event.step, wall_time=event.time)
            self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:TensorBoardTracker"
    return [Component("tracker", "tensorboard", target, extra="tensorboard", summary="event files")]
