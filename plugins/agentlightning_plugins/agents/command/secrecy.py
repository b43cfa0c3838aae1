"""Hides the environment and memory of this process from the commands that it starts."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from typing import Final

logger = logging.getLogger("agentlightning")
_PR_SET_DUMPABLE: Final = 4


@functools.cache
def hide_process() -> None:
    """On Linux, keeps the user's programs from reading this process's environment and memory; elsewhere, does nothing.

    The user's debuggers and profilers can then no longer attach, and a crash leaves no core dump. Programs that this
    process starts are not affected.
    """
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        logger.warning("commands can read the environment of this process: errno %d", ctypes.get_errno())
