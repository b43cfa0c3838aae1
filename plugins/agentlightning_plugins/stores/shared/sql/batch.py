"""Work of callers in several event loops that is done together in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Item(Generic[W]):
    """The work of one caller and the future for its outcome."""

    __slots__ = ("error", "future", "loop", "result", "work")

    def __init__(self, work: W) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        """Resolves the caller's future; called in its loop."""
        if self.future.done():  # cancelled: what was done stays done
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Inbox(Generic[W]):
    """Takes work from any number of event loops and delivers it to the thread that does it.

    Work submitted in one iteration of an event loop is delivered together: if the first item woke the thread, the
    thread would do only that item, and take the GIL from the callers that are about to submit more.
    """

    def __init__(self, deliver: Callable[[list[Item[W]]], None]) -> None:
        """Makes an inbox.

        Args:
            deliver: called in the loop of the callers; must not block.
        """
        self._deliver = deliver
        self._submitted: dict[asyncio.AbstractEventLoop, list[Item[W]]] = {}

    def submit(self, work: W) -> asyncio.Future[Any]:
        """Submits work; the future belongs to the running loop."""
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
    """Wakes the callers, from any thread, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Item[Any]]] = {}
    for item in items:
        by_loop.setdefault(item.loop, []).append(item)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(settle_here, theirs)
        except RuntimeError:  # the loop is closed: its callers are gone
            continue


def settle_here(items: Iterable[Item[Any]]) -> None:
    """Resolves the futures of the running loop."""
    for item in items:
        item.settle()
