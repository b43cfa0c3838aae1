"""Callers who share a transaction: what each wants done, and how each learns of its outcome, in its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Item(Generic[W]):
    """One caller's part of a transaction, and where its outcome goes."""

    __slots__ = ("error", "future", "loop", "result", "work")

    def __init__(self, work: W) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Tells the caller; to be called in its loop."""
        if self.future.done():  # cancelled: what was done stands, nobody asks any more
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Inbox(Generic[W]):
    """Takes work from any number of event loops and delivers it to the thread that does it.

    What one turn of an event loop submits is delivered together: waking the thread for the first of it would have it
    do that alone, and take the interpreter from those who are about to submit more.
    """

    def __init__(self, deliver: Callable[[list[Item[W]]], None]) -> None:
        """Makes an inbox.

        Args:
            deliver: called in the loop of the callers; must not block.
        """
        self._deliver = deliver
        self._submitted: dict[asyncio.AbstractEventLoop, list[Item[W]]] = {}

    def submit(self, work: W) -> asyncio.Future[Any]:
        """Has the work done; the future of the running loop gets what it gives."""
        item = Item(work)
        waiting = self._submitted.get(item.loop)
        if waiting is None:
            self._submitted[item.loop] = [item]
            item.loop.call_soon(self._hand_over, item.loop)
        else:
            waiting.append(item)
        return item.future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        self._deliver(self._submitted.pop(loop))


def settle(items: Iterable[Item[Any]]) -> None:
    """Wakes the callers, from any thread: one call for each event loop, since each wakes a thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Item[Any]]] = {}
    for item in items:
        by_loop.setdefault(item.loop, []).append(item)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(settle_here, theirs)
        except RuntimeError:  # the loop is closed: its callers are gone
            continue


def settle_here(items: Iterable[Item[Any]]) -> None:
    """Tells the callers of the running loop."""
    for item in items:
        item.settle()
