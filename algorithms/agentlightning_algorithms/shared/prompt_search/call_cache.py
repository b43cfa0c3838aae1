"""A cache of model calls on disk: a resumed search does not pay for a recorded call again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.prompt_search.budget import CallUsage

FILE_NAME: Final = "llm_calls.jsonl"


@dataclass(frozen=True, kw_only=True)
class CachedCall(CallUsage):
    """A model call with its answer."""

    place: str
    """Identifies the call within the search; a resumed search makes the same call at the same place."""
    answer: str


class CallCache:
    """Answered calls by place. With a file, they survive the process."""

    def __init__(self, file: Path | None = None) -> None:
        """Opens the cache.

        Args:
            file: JSON lines, one per call; None keeps calls in memory only. An incomplete last line is dropped.

        Raises:
            ConfigError: a complete line of the file is damaged.
        """
        self.calls: dict[str, CachedCall] = {}
        self.skipped: set[str] = set()
        """Places whose call failed in a round that the search finished without the answer."""
        self._file = file
        if file is not None and file.exists():
            self._load(file)

    def record(self, call: CachedCall) -> None:
        """Adds a call; it is on disk when this returns."""
        self._append(asdict(call))
        self.calls[call.place] = call

    def record_skipped(self, places: Iterable[str]) -> None:
        """Records that the calls at these places failed permanently."""
        new = sorted(set(places) - self.skipped)
        if new:
            self._append({"skipped": new})
            self.skipped.update(new)

    def _append(self, line: object) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as stream:
            stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _load(self, file: Path) -> None:
        whole, newline, incomplete = file.read_bytes().rpartition(b"\n")
        if incomplete:
            os.truncate(file, len(whole) + len(newline))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                if "skipped" in record:
                    self.skipped.update(record["skipped"])
                else:
                    self.calls[record["place"]] = CachedCall(**record)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{file}, line {number}: not a record of a model call: {error}") from error
