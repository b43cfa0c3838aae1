"""Trackers: where a run's metrics go, besides the store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agentlightning.event import Event, RunFinished
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Run

logger = logging.getLogger("agentlightning")


class Tracker(Protocol):
    """Follows one run in the process of the trainer. A tracker that raises is dropped; training goes on."""

    def start(self, run: Run, directory: Path | None) -> None:
        """Called once, before the first event.

        Args:
            run: the run.
            directory: of the run; None when it keeps no files.
        """
        ...

    def on_event(self, event: Event) -> None:
        """Called with every event of the run, in order."""
        ...

    def close(self) -> None:
        """Called once, after the last event."""
        ...


async def follow(store: LightningStore, run: Run, trackers: Sequence[Tracker], directory: Path | None) -> None:
    """Feeds the events of a run to trackers until the run is finished."""
    active = list(trackers)

    def call(name: str, *arguments: object) -> None:
        for tracker in list(active):
            try:
                getattr(tracker, name)(*arguments)
            except Exception:  # isolation point: a failing tracker must not stop training
                logger.exception("tracker %s failed and is dropped", type(tracker).__name__)
                active.remove(tracker)

    call("start", run, directory)
    try:
        async for event in store.subscribe():
            call("on_event", event)
            if isinstance(event, RunFinished):
                return
    finally:
        call("close")
