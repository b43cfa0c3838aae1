"""A watchdog on event loops: how long they work without a pause, in CPU time, which a busy machine hardly changes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
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

    def note(handle: asyncio.Handle, cpu_s: float) -> None:
        is_watched = threading.current_thread().name == thread
        if is_watched and (not longest or cpu_s > longest[0].cpu_s):
            longest[:] = [Turn(cpu_s, str(handle))]

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", _measured(note))
        yield longest


def print_stalls(limit_s: float) -> None:
    """Makes this process write a line that begins with STALL for each turn of a loop above the limit."""

    def note(handle: asyncio.Handle, cpu_s: float) -> None:
        if cpu_s > limit_s:
            sys.stderr.write(f"STALL of {cpu_s:.3f} s in {str(handle)[:500]}\n")

    asyncio.Handle._run = _measured(note)


def _measured(note: Callable[[asyncio.Handle, float], None]) -> Callable[[asyncio.Handle], None]:
    run = asyncio.Handle._run

    def measure(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        note(handle, time.thread_time() - began)

    return measure
