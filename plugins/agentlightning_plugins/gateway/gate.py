"""What holds calls back while the weights of a model change."""

from __future__ import annotations

import asyncio
import time
from typing import Final

MAX_WAITING: Final = 10_000
"""Calls that may wait at once; more get 429."""
MAX_WAIT_S: Final = 300.0
"""For how long a call waits; then it gets 429. Below the 600 s after which official clients give up."""


class Gate:
    """Lets calls through, or makes them wait; counts those inside. Belongs to one event loop."""

    weight_version: int | None = None
    """Of the weights that calls get now, as far as the owner of the gateway said."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.in_flight = 0
        """Calls that are inside."""
        self.waiting = 0
        """Calls that wait to be let in."""

    @property
    def is_paused(self) -> bool:
        """Whether new calls wait."""
        return not self._is_open.is_set()

    async def enter(self) -> bool:
        """Waits until the gate is open, and goes in. False: too many wait already, or it took too long.

        Every True needs one ``leave``.
        """
        if self.is_paused:
            if self.waiting >= self._max_waiting:
                return False
            deadline = time.monotonic() + self._max_wait_s
            self.waiting += 1
            try:
                while self.is_paused:  # it may have been closed again before our turn came
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._is_open.wait()
            except TimeoutError:
                return False
            finally:
                self.waiting -= 1
        self.in_flight += 1
        if self.in_flight == 1:
            self._is_empty.clear()
        return True

    def leave(self) -> None:
        """Comes out."""
        self.in_flight -= 1
        if not self.in_flight:
            self._is_empty.set()

    def pause(self) -> None:
        """Makes new calls wait; those inside go on."""
        self._is_open.clear()

    def resume(self, weight_version: int | None) -> None:
        """Lets calls in again, those that waited first.

        Args:
            weight_version: of the weights that they get; None leaves it as it is.
        """
        if weight_version is not None:
            self.weight_version = weight_version
        self._is_open.set()

    async def drain(self, timeout_s: float | None) -> bool:
        """Waits until nobody is inside; False when the time ran out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True
