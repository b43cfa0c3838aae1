"""Returns the memory of large bodies to the system."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from typing import Final

_MALLOC_SETTINGS: Final = {-1: 8 * 2**20, -3: 512 * 1024, -8: 2}
"""glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX. asyncio's reads of 256 KiB are below the second one."""
_TRIM_AFTER_S: Final = 1.0
_malloc_trim: Callable[[int], int] | None = None
_is_due = False


def return_freed_memory() -> None:
    """Returns the memory of large bodies to the system soon after their requests, in a process that only serves.

    By default glibc keeps blocks of up to 32 MiB once it has freed one of this size, in several pools.
    """
    global _malloc_trim
    with contextlib.suppress(AttributeError):  # the C library is not glibc
        library = ctypes.CDLL(None)
        for parameter, value in _MALLOC_SETTINGS.items():
            library.mallopt(parameter, value)
        _malloc_trim = library.malloc_trim


def trim_soon() -> None:
    """Returns freed memory a second from now, if this process only serves; further calls until then have no effect."""
    global _is_due
    if _malloc_trim is not None and not _is_due:
        _is_due = True
        loop = asyncio.get_running_loop()
        loop.call_later(_TRIM_AFTER_S, lambda: loop.run_in_executor(None, _trim))


def _trim() -> None:
    global _is_due
    _is_due = False
    assert _malloc_trim is not None
    _malloc_trim(0)
