from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from agentlightning.types import AttemptedRollout

T = TypeVar("T")

_REMEMBER_S: Final = 60.0
_REMEMBER_AT_MOST: Final = 4096


class Polls:
    """Requests that wait for work or results. They end early when the client disconnects or the server stops.

    Call the methods in the event loop of the server.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._claims: OrderedDict[str, tuple[float, asyncio.Future[Sequence[AttemptedRollout]]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    def stop(self) -> None:
        """Ends all waits, and every later wait immediately."""
        self._stopping = True
        for work in self._waiting:
            work.cancel()

    async def wait(self, work: asyncio.Future[T]) -> T | None:
        """Returns the result of ``work``, or None if the server stops first. ``work`` is cancelled with the caller."""
        if self._stopping:
            work.cancel()
        self._waiting.add(work)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:  # the client has disconnected
            work.cancel()
            raise
        finally:
            self._waiting.discard(work)
        return None if work.cancelled() else work.result()

    async def claim(
        self, request_id: str | None, dequeue: Callable[[], Coroutine[Any, Any, Sequence[AttemptedRollout]]]
    ) -> Sequence[AttemptedRollout]:
        """Runs ``dequeue`` once for each ``request_id``, even if the client repeats the request.

        Otherwise a claim whose answer was lost would stay with a worker that never received it, but whose heartbeats
        renew its lease.
        """
        if request_id is None:
            return await self.wait(asyncio.ensure_future(dequeue())) or ()
        self._forget()
        if request_id not in self._claims:
            self._claims[request_id] = time.monotonic(), asyncio.ensure_future(dequeue())
        return await self.wait(self._claims[request_id][1]) or ()

    async def release(self, request_id: str) -> Sequence[AttemptedRollout]:
        """Makes ``claim`` return nothing for this id from now on, and returns the rollouts already claimed."""
        nothing: asyncio.Future[Sequence[AttemptedRollout]] = asyncio.get_running_loop().create_future()
        nothing.set_result(())
        self._forget()
        _, work = self._claims.pop(request_id, (0.0, nothing))
        self._claims[request_id] = time.monotonic(), nothing
        work.cancel()
        await asyncio.wait({work})
        return () if work.cancelled() or work.exception() else work.result()

    def _forget(self) -> None:
        oldest_allowed = time.monotonic() - _REMEMBER_S
        while self._claims:
            request_id, (asked_at, work) = next(iter(self._claims.items()))
            if len(self._claims) < _REMEMBER_AT_MOST and (not work.done() or asked_at > oldest_allowed):
                return
            del self._claims[request_id]  # a dequeue that still waits goes on: its request holds it
