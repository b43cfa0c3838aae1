"""Tracker ``jsonl``: one line of JSON for each step, in ``metrics.jsonl`` of the run's directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from agentlightning.errors import ConfigError
from agentlightning.event import Event, RunFinished, StepFinished
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.types import Run


class JsonlTracker:
    """Appends ``{"step", "time", **values}`` for each step and ``{"status", "time"}`` at the end.

    A step that a resumed run repeats replaces the line of its first time.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Sets the file; default is ``metrics.jsonl`` in the run's directory."""
        self._path = None if path is None else Path(path)
        self._file: BinaryIO | None = None
        self._earlier: set[int] = set()
        """Steps that an earlier process has written."""

    def start(self, run: Run, directory: Path | None) -> None:
        path = self._path = self._path or (directory and directory / "metrics.jsonl")
        if path is None:
            raise ConfigError("the tracker 'jsonl' needs a path or a run_dir to write to")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._earlier = {line["step"] for _, line in _read(path) if "step" in line}
        self._file = path.open("ab")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._remove(None)  # the end, which a killed process has not finished

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            if event.step in self._earlier:
                self._remove(event.step)
            self._write({"step": event.step, "time": event.time, **event.values})
        elif isinstance(event, RunFinished):
            self._write({"status": event.status, "time": event.time})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _remove(self, step: int | None) -> None:
        assert self._path is not None
        self.close()
        kept = [text for text, line in _read(self._path) if step is None or line.get("step") != step]
        replacement = self._path.with_suffix(".new")
        replacement.write_bytes(b"".join(kept))
        replacement.replace(self._path)
        self._earlier -= {step}
        self._file = self._path.open("ab")

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the lines of a file and their contents, without one that a killed process has not finished."""
    for text in path.read_bytes().splitlines(keepends=True):
        with contextlib.suppress(orjson.JSONDecodeError):
            line = orjson.loads(text)
            if isinstance(line, dict):
                yield text, line


@hookimpl
def components() -> list[Component]:
    return [Component("tracker", "jsonl", f"{__name__}:JsonlTracker", summary="metrics.jsonl in the run's directory")]
