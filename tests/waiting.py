"""Waiting for a condition that no event reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object | Awaitable[object]], timeout_s: float = 60.0) -> None:
    """Waits until a condition, which may be a coroutine function, returns a true value."""
    async with asyncio.timeout(timeout_s):
        while True:
            met = condition()
            if await met if isinstance(met, Awaitable) else met:
                return
            await asyncio.sleep(0.005)
