"""A watchdog on the event loops of this process: how long they work without a pause."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest


class Turn(NamedTuple):
    """One callback of an event loop, from its start to its next wait."""

    cpu_s: float
    callback: str


@contextlib.contextmanager
def watch_loop(monkeypatch: pytest.MonkeyPatch, thread: str) -> Iterator[list[Turn]]:
    """Keeps the longest turn of the loops in threads of a name. The list may be cleared at any time."""
    longest: list[Turn] = []
    run = asyncio.Handle._run

    def measure(handle: asyncio.Handle) -> None:
        if threading.current_thread().name != thread:
            return run(handle)
        began = time.thread_time()
        run(handle)
        cpu_s = time.thread_time() - began
        if not longest or cpu_s > longest[0].cpu_s:
            longest[:] = [Turn(cpu_s, str(handle))]

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", measure)
        yield longest
