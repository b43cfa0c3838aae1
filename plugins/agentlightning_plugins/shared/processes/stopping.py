"""Orderly shutdown on Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import sys
import threading
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
