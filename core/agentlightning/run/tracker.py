"""Trackers: where a run's metrics go, besides the store."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from agentlightning.event import Event, RunFinished
from agentlightning.plugin.registry import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Run

logger = logging.getLogger("agentlightning")
_CLOSE_S: Final = 30.0


class Tracker(Protocol):
    """Follows one run in the process of the trainer, in a thread of its own.

    A tracker that raises is closed and dropped; training goes on.
    """

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


class _Observers:
    """The plugins' ``observe`` hooks, as a tracker."""

    def __init__(self) -> None:
        self._hooks = list(get_manager().hook.observe.get_hookimpls())

    def start(self, run: Run, directory: Path | None) -> None:
        pass

    def on_event(self, event: Event) -> None:
        for hook in list(self._hooks):
            try:
                hook.function(*([event] if hook.argnames else []))
            except Exception:  # isolation point: a plugin that watches must not stop training
                logger.exception("observe of plugin %s failed and is not called again", hook.plugin_name)
                self._hooks.remove(hook)

    def close(self) -> None:
        pass


async def follow(store: LightningStore, run: Run, trackers: Sequence[Tracker], directory: Path | None) -> None:
    """Feeds the events of a run to trackers, and to plugins that observe, until the run is finished.

    Each has a thread of its own, so a slow one delays neither training nor the others. At the end it gets ``_CLOSE_S``
    seconds to catch up.
    """
    threads = [_TrackerThread(tracker, run, directory) for tracker in (*trackers, _Observers())]
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
                logger.warning("tracker %s is not done after %.0f s; it is left behind", thread.name, _CLOSE_S)


class _TrackerThread(threading.Thread):
    def __init__(self, tracker: Tracker, run: Run, directory: Path | None) -> None:
        super().__init__(name=type(tracker).__name__, daemon=True)
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
