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
    """The requests that wait for something. They end early when their client leaves and when the server stops.

    All methods belong to the event loop of the server.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[Any]] = set()
        self._stopping = False
        self._claims: OrderedDict[str, tuple[float, asyncio.Future[Sequence[AttemptedRollout]]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def stop(self) -> None:
        """Ends all waiting, now and from now on."""
        self._stopping = True
        for work in self._waiting:
            work.cancel()

    async def wait(self, work: asyncio.Future[T], timeout: float | None = None) -> T | None:
        """The result of ``work``, or None when the server stops first. ``work`` is cancelled with the caller.

        Raises:
            TimeoutError: ``work`` goes on, and can be waited for again.
        """
        if self._stopping:
            work.cancel()
        self._waiting.add(work)
        try:
            done, _ = await asyncio.wait({work}, timeout=timeout)
        except asyncio.CancelledError:  # the client is gone
            work.cancel()
            raise
        finally:
            self._waiting.discard(work)
        if not done:
            raise TimeoutError
        return None if work.cancelled() else work.result()

    async def claim(
        self, request_id: str | None, dequeue: Callable[[], Coroutine[Any, Any, Sequence[AttemptedRollout]]]
    ) -> Sequence[AttemptedRollout]:
        """Runs ``dequeue`` once for each ``request_id``, however often a client with a bad connection has to ask.

        Otherwise a claim whose answer was lost would stay with a worker that does not know of it, and that keeps its
        lease alive by heartbeats.
        """
        if request_id is None:
            return await self.wait(asyncio.ensure_future(dequeue())) or ()
        self._forget()
        if request_id not in self._claims:
            self._claims[request_id] = time.monotonic(), asyncio.ensure_future(dequeue())
        return await self.wait(self._claims[request_id][1]) or ()

    async def release(self, request_id: str) -> Sequence[AttemptedRollout]:
        """Makes ``claim`` of this id fruitless, whenever it comes, and returns what it has claimed already."""
        nothing: asyncio.Future[Sequence[AttemptedRollout]] = asyncio.get_running_loop().create_future()
        nothing.set_result(())
        _, work = self._claims.pop(request_id, (0.0, nothing))
        self._claims[request_id] = time.monotonic(), nothing
        work.cancel()
        await asyncio.wait({work})
        return () if work.cancelled() or work.exception() else work.result()

    def _forget(self) -> None:
        oldest_allowed = time.monotonic() - _REMEMBER_S
        while self._claims:
            request_id, (asked_at, work) = next(iter(self._claims.items()))
            if not work.done() or (asked_at > oldest_allowed and len(self._claims) < _REMEMBER_AT_MOST):
                return
            del self._claims[request_id]
