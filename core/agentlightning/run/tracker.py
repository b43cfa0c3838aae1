"""Trackers: receive the events of a run, such as its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from pluggy import HookImpl

from agentlightning.event import Event, RolloutFinished, RunFinished, StepFinished
from agentlightning.plugin.registry import get_manager
from agentlightning.records import Rollout, Run, Span
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")
_CLOSE_S: Final = 30.0
"""How long a tracker may work after the end of a run."""
_CLOSE_PLUGIN_S: Final = 5.0
"""The same for the hooks of a plugin."""
_MAX_BEHIND: Final = 10_000
_SAMPLES: Final = 8


Sample: TypeAlias = tuple[Rollout, Sequence[Span]]
"""A rollout that has finished, and the spans of its latest attempt."""


class Tracker(Protocol):
    """Follows one run in the trainer's process, in a separate thread.

    A tracker that raises is closed and dropped; training continues. A resumed run has a new tracker, which adds to what
    an earlier one stored. ``agentlightning.testing.tracker.TrackerConformance`` tests a tracker.

    It may also have a method ``on_samples(step, samples)``, which is called after the event of a step with up to 8
    rollouts (``Sample``) that have finished since the previous step, and a method ``on_rollout(rollout, spans)``, which
    is called with every rollout that has finished, and the spans of its latest attempt, the gateway's included.
    """

    def start(self, run: Run, directory: Path | None) -> None:
        """Called once, before the first event; the directory is None if the run keeps no files.

        Connects to the backend, which the constructor does not; raises if there is none.
        """

    def on_event(self, event: Event) -> None:
        """Called with every event of the run, in order. Metrics (``StepFinished``) are finite and have any name."""

    def close(self) -> None:
        """Called after the last event, or after an error; does nothing without ``start``, and the second time."""


async def follow(store: LightningStore, run: Run, trackers: Sequence[Tracker], directory: Path | None) -> None:
    """Sends the events of a run to trackers and to the hooks ``observe`` and ``observe_rollout`` until it is finished.

    Each tracker and plugin has its own thread, so a slow one delays only itself. It loses events when it is more than
    ``_MAX_BEHIND`` behind, or is not done ``_CLOSE_S`` (a plugin: ``_CLOSE_PLUGIN_S``) after the end of the run.
    """
    threads = [_TrackerThread(tracker, f"tracker {type(tracker).__name__}", run, directory) for tracker in trackers]
    for plugin, hooks in _hooks_by_plugin().items():
        settings = get_manager().plugins[plugin].settings
        observer = _Observer(hooks, {"run": run, "directory": directory, "settings": settings})
        threads.append(_TrackerThread(observer, f"plugin {plugin}", run, directory, close_s=_CLOSE_PLUGIN_S))
    showing = [thread for thread in threads if hasattr(thread.tracker, "on_samples")]
    exporting = [thread for thread in threads if hasattr(thread.tracker, "on_rollout")]
    finished: deque[str] = deque(maxlen=_SAMPLES)
    try:
        async for event in store.subscribe():
            for thread in threads:
                thread.send("on_event", event)
            if exporting and isinstance(event, RolloutFinished):
                for rollout, spans in await _read_samples(store, [event.rollout_id]):
                    for thread in exporting:
                        thread.send("on_rollout", rollout, spans)
            if showing and isinstance(event, RolloutFinished):
                finished.append(event.rollout_id)
            if finished and isinstance(event, StepFinished):
                samples = await _read_samples(store, finished)
                finished.clear()
                for thread in showing:
                    thread.send("on_samples", event.step, samples)
            if isinstance(event, RunFinished):
                return
    finally:
        await asyncio.gather(*(asyncio.to_thread(thread.finish) for thread in threads))


async def _read_samples(store: LightningStore, rollout_ids: Iterable[str]) -> list[Sample]:
    samples: list[Sample] = []
    for rollout_id in rollout_ids:
        if (rollout := await store.get_rollout_by_id(rollout_id)) is not None:
            samples.append((rollout, await store.query_spans(rollout_id, "latest")))
    return samples


def _hooks_by_plugin() -> dict[str, dict[str, HookImpl]]:
    found: dict[str, dict[str, HookImpl]] = {}
    for name in ("observe", "observe_rollout"):
        for implementation in getattr(get_manager().hook, name).get_hookimpls():
            found.setdefault(implementation.plugin_name, {})[name] = implementation
    return found


class _Observer:
    """The hooks of a plugin as a tracker."""

    def __init__(self, hooks: Mapping[str, HookImpl], context: Mapping[str, Any]) -> None:
        self._hooks, self._context = hooks, context
        if "observe_rollout" in hooks:
            self.on_rollout = lambda rollout, spans: self._call("observe_rollout", rollout=rollout, spans=spans)

    def start(self, run: Run, directory: Path | None) -> None: ...

    def close(self) -> None: ...

    def on_event(self, event: Event) -> None:
        self._call("observe", event=event)

    def _call(self, name: str, **arguments: Any) -> None:
        if (hook := self._hooks.get(name)) is not None:
            given = {**self._context, **arguments}
            hook.function(*[given[argument] for argument in hook.argnames])


class _TrackerThread(threading.Thread):
    def __init__(
        self, tracker: Any, name: str, run: Run, directory: Path | None, *, close_s: float | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.tracker = tracker
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(_MAX_BEHIND)
        self._lost = 0
        self._run_record = run
        self._directory = directory
        self._close_s = _CLOSE_S if close_s is None else close_s
        self.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Calls a method of the tracker in its thread, unless it has failed or is too far behind."""
        if not self.is_alive():
            return
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            if not self._lost:
                logger.warning("%s is %d events behind and loses the next ones", self.name, _MAX_BEHIND)
            self._lost += 1

    def finish(self) -> None:
        """Waits until the tracker is done; leaves it behind if that takes too long."""
        deadline = time.monotonic() + self._close_s
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=self._close_s)
        self.join(max(0.0, deadline - time.monotonic()))
        lost = self._lost + (self._calls.qsize() if self.is_alive() else 0)
        if lost or self.is_alive():
            logger.warning("%s lost %d events of the run: it was too slow", self.name, lost)

    def run(self) -> None:
        tracker = self.tracker
        try:
            try:
                tracker.start(self._run_record, self._directory)
                while (call := self._calls.get()) is not None:
                    method, arguments = call
                    getattr(tracker, method)(*arguments)
            finally:
                tracker.close()
        except Exception:  # isolation point: a failing tracker must not stop training
            logger.exception("%s failed and is dropped", self.name)
