"""Admission control: holds calls back while the weights of the models change."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from agentlightning_plugins.gateway.refusal import CallRefused

MAX_WAITING: Final = 10_000
"""Calls that may wait at the same time; further calls get status 429."""
PAUSE_WAIT_S: Final = 300.0
"""Default time that a call waits before it gets 429. Shorter than the timeout of official clients, 600 s."""
_RETRY_S: Final = 5


class Admission:
    """Admits calls or makes them wait, and counts those in flight. Belongs to one event loop."""

    weight_version: int | None = None
    """The version of the weights that serve calls now, if the owner of the gateway stated it."""

    def __init__(self, max_waiting: int = MAX_WAITING, pause_wait_s: float = PAUSE_WAIT_S) -> None:
        self._max_waiting = max_waiting
        self._pause_wait_s = pause_wait_s
        self._is_closed = False
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.in_flight = 0
        """Calls that were admitted and have not ended."""
        self.waiting = 0
        """Calls that wait to be admitted."""

    @property
    def is_paused(self) -> bool:
        """Whether new calls wait."""
        return not self._is_open.is_set()

    async def enter(self) -> None:
        """Waits until the call is admitted; afterwards, ``leave`` must be called once.

        Raises:
            CallRefused: too many calls wait already, the wait takes too long, or the gateway stops.
        """
        if self.is_paused:
            if self.waiting >= self._max_waiting:
                raise _refusal()
            deadline = time.monotonic() + self._pause_wait_s
            self.waiting += 1
            try:
                while self.is_paused:  # it may be paused again before this task runs
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._is_open.wait()
            except TimeoutError:
                raise _refusal() from None
            finally:
                self.waiting -= 1
        if self._is_closed:
            raise _refusal()
        self.in_flight += 1
        if self.in_flight == 1:
            self._is_empty.clear()

    def leave(self) -> None:
        """Ends an admitted call."""
        self.in_flight -= 1
        if not self.in_flight:
            self._is_empty.set()

    def pause(self) -> None:
        """Makes new calls wait; calls in flight continue."""
        self._is_open.clear()

    def resume(self, weight_version: int | None) -> None:
        """Admits calls again, with a new version of the weights unless it is None."""
        if weight_version is not None:
            self.weight_version = weight_version
        self._is_open.set()

    def close(self) -> None:
        """Refuses waiting and further calls, because their weight version would be unknown."""
        self._is_closed = True
        self._is_open.set()

    async def drain(self, timeout_s: float | None) -> bool:
        """Waits until no call is in flight; returns False if the timeout expires first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True


def _refusal() -> CallRefused:
    message = "the gateway is paused while the model's weights change; try again"
    return CallRefused(429, message, "paused", {"Retry-After": str(_RETRY_S)})
