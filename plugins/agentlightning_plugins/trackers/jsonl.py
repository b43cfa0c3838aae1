"""Tracker ``jsonl``: one line of JSON for each step, in ``metrics.jsonl`` of the run's directory."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import orjson

from agentlightning.errors import ConfigError
from agentlightning.event import Event, RunFinished, StepFinished
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.types import Run


class JsonlTracker:
    """Appends ``{"step", "time", **values}`` for each step and ``{"status", "time"}`` at the end."""

    def __init__(self, path: str | Path | None = None) -> None:
        """Sets the file; default is ``metrics.jsonl`` in the run's directory."""
        self._path = None if path is None else Path(path)
        self._file: BinaryIO | None = None

    def start(self, run: Run, directory: Path | None) -> None:
        path = self._path
        if path is None:
            if directory is None:
                raise ConfigError("the tracker 'jsonl' needs a path or a run_dir to write to")
            path = directory / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self._write({"step": event.step, "time": event.time, **event.values})
        elif isinstance(event, RunFinished):
            self._write({"status": event.status, "time": event.time})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.trackers.jsonl:JsonlTracker"
    return [Component("tracker", "jsonl", target, summary="metrics.jsonl in the run's directory")]
