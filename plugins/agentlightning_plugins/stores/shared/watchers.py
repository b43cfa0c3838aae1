"""The functions that are called with the events of a store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from agentlightning.event import Event
from agentlightning.store.backend import Listener

logger = logging.getLogger("agentlightning")


class Watchers:
    """The functions that are called with the events of each commit."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Adds a listener; the returned function removes it."""
        with self._lock:
            self.listeners += (listener,)

        def remove() -> None:
            with self._lock:
                self.listeners = tuple(other for other in self.listeners if other is not listener)

        return remove

    def publish(self, events: Sequence[Event]) -> None:
        for listener in self.listeners:
            try:
                listener(events)
            except Exception:  # isolation point: one watcher must not fail the writer or other watchers
                logger.exception("a watcher of the store %s failed", self._store)
