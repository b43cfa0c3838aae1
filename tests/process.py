"""Helpers for processes that tests run and watch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.waiting import LIMIT_S, blocking_until


def wait_for(
    condition: Callable[[], bool],
    process: subprocess.Popen[bytes],
    log: Path,
    *,
    timeout_s: float = LIMIT_S,
) -> None:
    """Waits until a condition holds; fails with the end of the log if the process ends first or the time is over."""

    def met() -> bool:
        ended = process.poll() is not None
        holds = condition()
        assert holds or not ended, log.read_text()[-8000:]
        return holds

    blocking_until(met, timeout_s, why=lambda: log.read_text()[-8000:])


def count_open_files() -> int:
    """Returns the number of open files of this process, also where the process cannot list them in ``/proc``."""
    count = 0
    for number in range(4096):
        with contextlib.suppress(OSError):
            os.fstat(number)
            count += 1
    return count
