"""Helpers for processes that tests run and watch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.waiting import LIMIT_S, blocking_until


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, timeout_s: float = LIMIT_S
) -> None:
    """Waits until a condition holds; fails with the end of the log if the process ends first or the time is over."""

    def met() -> bool:
        ended = process.poll() is not None
        holds = condition()
        assert holds or not ended, log.read_text()[-8000:]
        return holds

    blocking_until(met, timeout_s, why=lambda: log.read_text()[-8000:])


def cpu_unit_s() -> float:
    """Returns the CPU seconds of counting to a million, here and now: 0.06 on an idle machine of 2026.

    A busy machine inflates CPU time too, so a test limits the cost of a request to a multiple of this.
    """
    began, number = time.thread_time(), 0
    while number < 1_000_000:
        number += 1
    return time.thread_time() - began


def count_open_files() -> int:
    """Returns the number of open files of this process, also where the process cannot list them in ``/proc``."""
    count = 0
    for number in range(4096):
        with contextlib.suppress(OSError):
            os.fstat(number)
            count += 1
    return count
