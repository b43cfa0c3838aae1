"""What a child process of ``multiprocessing`` does before its work. Each imports this, which imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

VARIABLE: Final = "TRACEPARENT"


def run_in_context(context: str, run: Callable[[], None]) -> None:
    """Runs a process that does the work of one trace."""
    os.environ[VARIABLE] = context
    run()


def call_in_context(context: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Makes one call of a pool's process, which does the work of other traces afterwards."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = context
    try:
        return function(*args, **kwargs)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
