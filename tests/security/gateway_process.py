"""Servers in separate processes that write their output to a file."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.waiting import until


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
    """Waits until the log shows the port."""

    def is_shown() -> bool:
        assert started.returncode is None, text_of(log)
        return re.search(pattern, text_of(log)) is not None

    await until(is_shown)
    return int(re.findall(pattern, text_of(log))[0])


def text_of(log: Path) -> str:
    return log.read_text(errors="replace")
