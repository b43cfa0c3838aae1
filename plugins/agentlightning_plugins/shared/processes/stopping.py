"""Event loops of a run: orderly shutdown on Ctrl-C and SIGTERM, and the loop of agents in the user's process."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import signal
import sys
import threading
import weakref
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from agentlightning.run.thread import stop_on_interrupt, until_set

T = TypeVar("T")

logger = logging.getLogger("agentlightning")
SIGTERM_EXIT_CODE: Final = 128 + signal.SIGTERM


_second_interrupt: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar(
    "agentlightning_second_interrupt", default=None
)


async def until_second_interrupt(work: Awaitable[T]) -> T | None:
    """Awaits ``work``, which lets rollouts in flight finish. A second Ctrl-C cancels it and returns None."""
    return await until_set(work, _second_interrupt.get())


async def until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Awaits ``work``. In the main thread, SIGTERM cancels it."""
    second_interrupt = threading.Event()
    _second_interrupt.set(second_interrupt)
    task = asyncio.ensure_future(work)
    is_terminated = False

    def stop() -> None:
        if not task.done():
            logger.warning("stopping after the rollouts in flight; press Ctrl-C again to stop them")
            task.cancel()

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        stop()

    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGTERM, terminate)
    stop_on_interrupt(stop)
    try:
        try:
            await asyncio.shield(task)  # so that Ctrl-C is handled here before it cancels the work
        except asyncio.CancelledError:
            stop()
            await asyncio.wait([task])
            await task
    except asyncio.CancelledError:
        if not is_terminated:
            raise
        sys.exit(SIGTERM_EXIT_CODE)
    finally:
        if not task.done():  # a second Ctrl-C broke the loop, or cancelled all of its tasks
            second_interrupt.set()
        if is_main:
            loop.remove_signal_handler(signal.SIGTERM)


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

    Clients, locks and graphs that agents keep in global variables belong to a loop, and would fail in another one. The
    loop is one of asyncio's own, whatever the policy (Ray sets uvloop's), because only these survive an agent's exit.
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
