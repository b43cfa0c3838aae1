"""Stop events, and waiting for work until one is set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
STOP_CHECK_S: Final = 0.1  # polling interval for stop events, which may belong to another thread


class StopEvent(Protocol):
    """A ``threading.Event``, an ``asyncio.Event``, an event of ``multiprocessing`` or anything similar."""

    def is_set(self) -> bool: ...


async def until_set(work: Awaitable[T], event: StopEvent | None) -> T | None:
    """Awaits ``work``, or cancels it and returns None soon after ``event`` is set."""
    if event is None:
        return await work
    limit, loop = asyncio.timeout(None), asyncio.get_running_loop()

    async def watch() -> None:
        while not event.is_set():  # noqa: ASYNC110 # the event may belong to another thread or process
            await asyncio.sleep(STOP_CHECK_S)
        limit.reschedule(loop.time())  # cancels the work once

    watcher = asyncio.create_task(watch())
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # raised by the work itself
            raise
        return None
    finally:
        watcher.cancel()
