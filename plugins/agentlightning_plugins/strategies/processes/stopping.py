"""Stopping in order."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from agentlightning.run.stop_event import until_set
from agentlightning.run.thread import stop_on_interrupt

T = TypeVar("T")

logger = logging.getLogger("agentlightning")
SIGTERM_EXIT_CODE: Final = 128 + signal.SIGTERM


_hurry: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("agentlightning_hurry", default=None)


async def until_hurried(work: Awaitable[T]) -> T | None:
    """Awaits what lets rollouts in flight finish. A second Ctrl-C cancels it; then this is None."""
    return await until_set(work, _hurry.get())


async def until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Awaits ``work``, cancelled by SIGTERM where signals can be handled: in the main thread."""
    hurry = threading.Event()
    _hurry.set(hurry)
    task = asyncio.ensure_future(work)
    is_told = False

    def stop() -> None:
        if not task.done():
            logger.warning("stopping: rollouts in flight are finished first; a second Ctrl-C does not wait for them")
            task.cancel()

    def tell() -> None:
        nonlocal is_told
        is_told = True
        stop()

    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGTERM, tell)
    stop_on_interrupt(stop)
    try:
        try:
            await asyncio.shield(task)  # so that Ctrl-C is answered before the work has dealt with it
        except asyncio.CancelledError:
            stop()
            await asyncio.wait([task])
            await task
    except asyncio.CancelledError:
        if not is_told:
            raise
        sys.exit(SIGTERM_EXIT_CODE)
    finally:
        if not task.done():  # a second Ctrl-C broke the loop, or cancelled all of its tasks
            hurry.set()
        if is_main:
            loop.remove_signal_handler(signal.SIGTERM)
