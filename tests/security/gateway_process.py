"""Servers in separate processes that write their output to a file."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path


@contextlib.asynccontextmanager
async def process(log: Path, *arguments: str, wrapper: Sequence[str] = ()) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a Python program, with a wrapper such as ``prlimit``, that writes its output to a file."""
    with log.open("wb") as file:
        started = await asyncio.create_subprocess_exec(*wrapper, sys.executable, *arguments, stdout=file, stderr=file)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def port_of(started: asyncio.subprocess.Process, log: Path, pattern: str) -> int:
    deadline = time.monotonic() + 120
    while (found := re.search(pattern, text_of(log))) is None:
        assert started.returncode is None, text_of(log)
        assert time.monotonic() < deadline, text_of(log)
        await asyncio.sleep(0.05)
    return int(found[1])


def text_of(log: Path) -> str:
    return log.read_text(errors="replace")
