"""Runs code of child processes in the trace context of their parent. Children import it, so it imports little."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

VARIABLE: Final = "TRACEPARENT"


def call_in_context(traceparent: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function with ``TRACEPARENT`` set, then restores it, because processes of a pool serve several traces."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = traceparent
    try:
        return function(*args, **kwargs)
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
