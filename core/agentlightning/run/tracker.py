"""Trackers: receive the events of a run, such as its metrics."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol, TypeAlias

from agentlightning.event import Event, RolloutFinished, RunFinished, StepFinished
from agentlightning.plugin.registry import get_manager
from agentlightning.records import Rollout, Run, Span
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")
_CLOSE_S: Final = 30.0
_SAMPLES: Final = 8


Sample: TypeAlias = tuple[Rollout, Sequence[Span]]
"""A rollout that has finished, and the spans of its latest attempt."""


class Tracker(Protocol):
    """Follows one run in the trainer's process, in a separate thread.

    A tracker that raises is closed and dropped; training continues.

    It may also have a method ``on_samples(step, samples)``, which is called after the event of a step with up to 8
    rollouts (``Sample``) that have finished since the previous step.
    """

    def start(self, run: Run, directory: Path | None) -> None:
        """Called once, before the first event; the directory is None if the run keeps no files."""

    def on_event(self, event: Event) -> None:
        """Called with every event of the run, in order."""

    def close(self) -> None:
        """Called once, after the last event."""


async def follow(store: LightningStore, run: Run, trackers: Sequence[Tracker], directory: Path | None) -> None:
    """Sends the events of a run to trackers and ``observe`` hooks until the run is finished.

    Each has its own thread, so a slow one delays neither training nor the others. At the end each gets ``_CLOSE_S``
    seconds to catch up.
    """
    threads = [_TrackerThread(tracker, type(tracker).__name__, run, directory) for tracker in trackers]
    for hook in get_manager().hook.observe.get_hookimpls():
        on_event = hook.function if hook.argnames else lambda _, observe=hook.function: observe()
        observer = SimpleNamespace(start=lambda *_: None, on_event=on_event, close=lambda: None)
        threads.append(_TrackerThread(observer, f"observe of plugin {hook.plugin_name}", run, directory))
    showing = [thread for thread in threads if thread.shows_samples]
    finished: deque[str] = deque(maxlen=_SAMPLES)
    try:
        async for event in store.subscribe():
            for thread in threads:
                thread.events.put(event)
            if showing and isinstance(event, RolloutFinished):
                finished.append(event.rollout_id)
            if finished and isinstance(event, StepFinished):
                samples: list[Sample] = []
                for rollout_id in finished:
                    if (rollout := await store.get_rollout_by_id(rollout_id)) is not None:
                        samples.append((rollout, await store.query_spans(rollout_id, "latest")))
                finished.clear()
                for thread in showing:
                    thread.events.put((event.step, samples))
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
    def __init__(self, tracker: Any, name: str, run: Run, directory: Path | None) -> None:
        super().__init__(name=name, daemon=True)
        self.events: queue.SimpleQueue[Event | tuple[int, list[Sample]] | None] = queue.SimpleQueue()
        self.shows_samples = hasattr(tracker, "on_samples")
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
                    if isinstance(event, tuple):
                        tracker.on_samples(*event)
                    else:
                        tracker.on_event(event)
            finally:
                tracker.close()
        except Exception:  # isolation point: a failing tracker must not stop training
            logger.exception("tracker %s failed and is dropped", self.name)
