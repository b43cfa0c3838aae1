"""The ledger: every model call that a search has paid for, written down before its answer is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError

FILE_NAME: Final = "llm_calls.jsonl"


@dataclass(frozen=True)
class PaidCall:
    """One answered model call."""

    place: str
    """Which call of the search it is: the same in every life of a run."""
    model: str
    answer: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Ledger:
    """Paid calls by their place. With a file it survives the process: a recorded call is never made again."""

    def __init__(self, file: Path | None = None) -> None:
        """Opens the ledger.

        Args:
            file: JSON lines, one for each call; None keeps them in memory only. A last line that a kill cut off is
                dropped.

        Raises:
            ConfigError: the file is damaged elsewhere.
        """
        self.calls: dict[str, PaidCall] = {}
        self.skipped: set[str] = set()
        """Places whose call failed in a finished round; the search went on without them."""
        self._file = file
        if file is not None and file.exists():
            self._load(file)

    def record(self, call: PaidCall) -> None:
        """Keeps a call; when this returns, a kill does not lose it."""
        self._append(asdict(call))
        self.calls[call.place] = call

    def give_up(self, places: Iterable[str]) -> None:
        """Keeps that these calls failed for good."""
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
        whole, newline, cut_off = file.read_bytes().rpartition(b"\n")
        if cut_off:
            os.truncate(file, len(whole) + len(newline))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                if "skipped" in record:
                    self.skipped.update(record["skipped"])
                else:
                    call = PaidCall(**record)
                    self.calls[call.place] = call
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: not a record of a model call: {error}") from error
