"""Trackers: receive the events of a run, such as its metrics."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from agentlightning.event import Event, RunFinished
from agentlightning.plugin.registry import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Run

logger = logging.getLogger("agentlightning")
_CLOSE_S: Final = 30.0


class Tracker(Protocol):
    """Follows one run in the trainer's process, in a thread of its own.

    A tracker that raises is closed and dropped; training continues.
    """

    def start(self, run: Run, directory: Path | None) -> None:
        """Called once, before the first event; the directory is None if the run keeps no files."""
        ...

    def on_event(self, event: Event) -> None:
        """Called with every event of the run, in order."""
        ...

    def close(self) -> None:
        """Called once, after the last event."""
        ...


class _Observer:
    """A plugin's ``observe`` hook as a tracker."""

    def __init__(self, hook: Any) -> None:
        self.name = f"observe of plugin {hook.plugin_name}"
        self._hook = hook

    def start(self, run: Run, directory: Path | None) -> None:
        pass

    def on_event(self, event: Event) -> None:
        self._hook.function(*([event] if self._hook.argnames else []))

    def close(self) -> None:
        pass


async def follow(store: LightningStore, run: Run, trackers: Sequence[Tracker], directory: Path | None) -> None:
    """Sends the events of a run to trackers and ``observe`` hooks until the run is finished.

    Each has its own thread, so a slow one delays neither training nor the others. At the end each gets ``_CLOSE_S``
    seconds to catch up.
    """
    observers = map(_Observer, get_manager().hook.observe.get_hookimpls())
    threads = [_TrackerThread(tracker, run, directory) for tracker in (*trackers, *observers)]
    try:
        async for event in store.subscribe():
            for thread in threads:
                thread.events.put(event)
            if isinstance(event, RunFinished):
                return
    finally:
        for thread in threads:
            thread.events.put(None)
        await asyncio.gather(*(asyncio.to_thread(thread.join, _CLOSE_S) for thread in threads))
        for thread in threads:
            if thread.is_alive():
                logger.warning("tracker %s is not done after %.0f s and is abandoned", thread.name, _CLOSE_S)


class _TrackerThread(threading.Thread):
    def __init__(self, tracker: Tracker, run: Run, directory: Path | None) -> None:
        super().__init__(name=tracker.name if isinstance(tracker, _Observer) else type(tracker).__name__, daemon=True)
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._tracker = tracker
        self._run_record = run
        self._directory = directory
        self.start()

    def run(self) -> None:
        tracker = self._tracker
        try:
            tracker.start(self._run_record, self._directory)
            try:
                while (event := self.events.get()) is not None:
                    tracker.on_event(event)
            finally:
                tracker.close()
        except Exception:  # isolation point: a failing tracker must not stop training
            logger.exception("tracker %s failed and is dropped", self.name)
