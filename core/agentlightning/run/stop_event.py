"""Stop events, and waiting for work until one is set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
STOP_CHECK_S: Final = 0.1  # polling interval for stop events, which may belong to another thread


class StopEvent(Protocol):
    """``threading.Event``, ``asyncio.Event``, a multiprocessing one or anything alike."""

    def is_set(self) -> bool: ...


async def until_set(work: Awaitable[T], event: StopEvent | None) -> T | None:
    """Awaits ``work``, or cancels it and returns None soon after ``event`` is set."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if event is not None and event.is_set():
                task.cancel()
                event = None  # cancel only once: a second time would interrupt its cleanup
            await asyncio.wait([task], timeout=None if event is None else STOP_CHECK_S)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return None if task.cancelled() else task.result()
