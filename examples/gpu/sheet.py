"""Figures that survive a kill, and a clock that ends a call."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

Figures = dict[str, float | str]


class Sheet:
    """What was measured: a line of JSON and a row of Markdown for each name, on disk at once."""

    def __init__(self, out: Path, machine: Mapping[str, str]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._json, self._table, self._machine = out / "measured.jsonl", out / "measured.md", dict(machine)
        self.done: set[str] = set()
        """Names whose measurement is complete."""
        for line in self._json.read_text().splitlines() if self._json.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the call was killed while it wrote this line
                continue
            if entry["complete"]:
                self.done.add(entry["name"])
        if not self._table.exists():
            self._append(self._table, "| measured | figures | on |\n|---|---|---|")

    def add(self, name: str, figures: Figures, *, complete: bool = True) -> None:
        """Writes the figures of a measurement; one that is not complete is measured again by the next call."""
        entry = {"name": name, "complete": complete, "figures": figures, "machine": self._machine, "time": time.time()}
        said = ", ".join(f"{key} {v if isinstance(v, str) else format(v, '.4g')}" for key, v in figures.items())
        self._append(self._json, json.dumps(entry))
        row = f"| {name}{'' if complete else ' (stopped)'} | {said} | {self._machine['gpu']} |"
        self._append(self._table, row)
        print(row, flush=True)
        if complete:
            self.done.add(name)

    @staticmethod
    def _append(path: Path, line: str) -> None:
        with path.open("a+b") as file:
            if file.tell() and path.read_bytes()[-1:] != b"\n":
                file.write(b"\n")  # ends the line of a call that was killed
            file.write(f"{line}\n".encode())
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def interrupted_after(seconds: float) -> Iterator[list[bool]]:
    """Interrupts this process as Ctrl-C does once the seconds are over; yields a list that then has an item."""
    over: list[bool] = []

    def interrupt(*_: object) -> None:
        over.append(True)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield over
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
