"""A cache of limited memory that evicts the least recently used entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_ENTRY_BYTES: Final = 400
"""Memory of an entry, without the contents of its key and value."""


class SizedCache(Generic[K, V]):
    """Maps keys to values in at most ``max_bytes`` of memory; may be used from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Returns the value of a key, and makes its entry the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Adds or replaces an entry of ``size`` bytes; an entry that is larger than the cache is not kept."""
        size += _ENTRY_BYTES
        with self._lock:
            self._size -= self._entries.pop(key, (value, 0))[1]
            if size > self._max_bytes:
                return
            self._size += size
            self._entries[key] = value, size
            while self._size > self._max_bytes:
                self._size -= self._entries.popitem(last=False)[1][1]
