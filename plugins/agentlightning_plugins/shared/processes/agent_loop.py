"""The event loop of agents that run in the user's process; it stays open from one run to the next."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
_lock: Final = threading.Lock()
_free: Final[list[_AgentLoop]] = []


class _AgentLoop(asyncio.SelectorEventLoop):
    """An event loop that tracks its client connections, so that they can be closed when a run ends."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **kwargs)
        self._connections.add(transport)
        return transport, protocol

    async def close_connections(self) -> None:
        """Closes the connections that a run has opened: another loop, such as a notebook's, cannot use them.

        Clients open new connections in the loop of their next call.
        """
        for transport in list(self._connections):
            transport.close()
        await self.shutdown_asyncgens()
        self._asyncgens_shutdown_called = False  # the loop is used again
        await asyncio.sleep(0)  # closes the sockets


def run_with_agents(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as ``asyncio.run`` does, but in a loop that the next call reuses.

    Clients, locks and graphs that agents keep in global variables belong to a loop, and would fail in another one.
    """
    with _lock:
        loop = _free.pop() if _free else _AgentLoop()
    is_done = False

    async def until_done() -> T:
        nonlocal is_done
        try:
            return await main
        finally:
            is_done = True

    try:
        return asyncio.Runner(loop_factory=lambda: loop).run(until_done())  # not closed
    finally:
        if is_done:  # otherwise the loop still holds the run
            loop.run_until_complete(loop.close_connections())
            with _lock:
                _free.append(loop)


@atexit.register
def _close_loops() -> None:
    while _free:
        _free.pop().close()
