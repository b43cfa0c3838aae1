"""Stopping in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Final

logger = logging.getLogger("agentlightning")
SIGTERM_EXIT_CODE: Final = 128 + signal.SIGTERM


async def until_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Awaits ``work``, cancelled by SIGTERM where signals can be handled: in the main thread."""
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
    try:
        try:
            await asyncio.shield(task)  # so that Ctrl-C is answered before the work has dealt with it
        except asyncio.CancelledError:
            stop()
            await task
    except asyncio.CancelledError:
        if not is_told:
            raise
        sys.exit(SIGTERM_EXIT_CODE)
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGTERM)
