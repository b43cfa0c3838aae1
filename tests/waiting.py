"""Waiting for a condition that no event reports. Only a hang reaches the limit: a slow machine may be busy as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

LIMIT_S: Final = 300.0


async def until(condition: Callable[[], object | Awaitable[object]], timeout_s: float = LIMIT_S) -> None:
    """Waits until a condition, which may be a coroutine function, returns a true value."""
    async with asyncio.timeout(timeout_s):
        while True:
            met = condition()
            if await met if isinstance(met, Awaitable) else met:
                return
            await asyncio.sleep(0.005)


def blocking_until(
    condition: Callable[[], object], timeout_s: float = LIMIT_S, *, why: Callable[[], str] = str
) -> None:
    """Blocks this thread until a condition returns a true value; a failure shows the text of ``why``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {why()}")
        time.sleep(0.005)
