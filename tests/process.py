"""Helpers for processes that tests run and watch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def wait_for(
    condition: Callable[[], bool],
    process: subprocess.Popen[bytes],
    log: Path,
    *,
    timeout_s: float = 60.0,
) -> None:
    """Waits until a condition holds; fails with the end of the log if the process ends first or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, log.read_text()[-8000:]
        assert time.monotonic() < deadline, log.read_text()[-8000:]
        time.sleep(0.01)


def count_open_files() -> int:
    """Returns the number of open files of this process, also where the process cannot list them in ``/proc``."""
    count = 0
    for number in range(4096):
        with contextlib.suppress(OSError):
            os.fstat(number)
            count += 1
    return count
