"""Events that say when to stop, and waiting for work until one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
STOP_CHECK_S: Final = 0.1
"""How soon an event is noticed: it may be of another thread, so it is asked again and again."""


class StopEvent(Protocol):
    """Anything that says whether to stop: ``threading.Event``, ``asyncio.Event`` or a multiprocessing one."""

    def is_set(self) -> bool:
        """Whether it is time to stop."""
        ...


def is_set(event: StopEvent | None) -> bool:
    """Whether there is an event, and it is set."""
    return event is not None and event.is_set()


async def until_set(work: Awaitable[T], event: StopEvent | None) -> T | None:
    """Awaits ``work``, or cancels it and returns None soon after ``event`` is set."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if is_set(event):
                task.cancel()
                event = None  # once: a second time would break off what it does at its end
            await asyncio.wait([task], timeout=None if event is None else STOP_CHECK_S)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return None if task.cancelled() else task.result()
