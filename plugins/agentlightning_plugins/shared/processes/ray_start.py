"""Starts Ray's processes on a machine that may be busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import ray

T = TypeVar("T")
_ATTEMPTS: Final = 4


def start_patiently(start: Callable[[], T]) -> T:
    """Calls a function that starts Ray, again if its processes needed more than the 30 s that Ray gives them."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return start()
        except Exception as error:  # isolation point: Ray has no type for this timeout
            ray.shutdown()
            if attempt == _ATTEMPTS or "timed out during startup" not in str(error):
                raise
    raise AssertionError("the last attempt returns or raises")
