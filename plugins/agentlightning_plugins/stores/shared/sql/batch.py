"""``DurableBackend``, the base of the SQL stores: work of callers in several event loops is done in one thread."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from agentlightning.errors import StoreError
from agentlightning.event import Event, RolloutEnqueued, RolloutFinished
from agentlightning.store.backend import Claim, Guard, Write
from agentlightning.types import Rollout, Span
from agentlightning_plugins.stores.shared.sql.changes import Append, Claiming, Commit, TakeNumbers, Work
from agentlightning_plugins.stores.shared.sql.document import decode

logger = logging.getLogger("agentlightning")

COUNT: Final = "SELECT name, sum(number) FROM {}tally GROUP BY name"
OPEN_RUNS: Final = """
    SELECT run_id FROM {0}rollout WHERE queue_position IS NOT NULL
    UNION SELECT r.run_id FROM {0}attempt a JOIN {0}rollout r ON r.position = a.rollout WHERE {1}"""
"""Finds the runs with queued or running rollouts, by two indexes that contain nothing else."""


WAITING: Final = "SELECT run_id, rollout_id FROM {}rollout WHERE queue_position IS NOT NULL"
ENDED_SINCE: Final = "SELECT record FROM {}rollout WHERE end_time >= {}"
CLOCKS_S: Final = 60.0
"""How far the event times of other processes may lag behind."""
KEPT_EVENTS: Final = 100_000
"""The events of this many transactions are kept for other processes. A process further behind reads the records."""
PRUNE_EVERY: Final = 64


def make_missed_events(waiting: Iterable[Sequence[Any]], ended: Iterable[Sequence[Any]]) -> list[Event]:
    """Replaces deleted events, given the rows of ``WAITING`` and ``ENDED_SINCE``.

    Some of these events were published before, which wakes waiters needlessly but does no harm.
    """
    logger.warning("this process was away for so long that it missed events of the store; it catches up now")
    events: list[Event] = [RolloutEnqueued(run_id=run_id, rollout_id=rollout_id) for run_id, rollout_id in waiting]
    for (record,) in ended:
        rollout = decode(Rollout, record)
        found: dict[str, Any] = {"status": rollout.status, "mode": rollout.mode, "time": rollout.end_time}
        events.append(RolloutFinished(run_id=rollout.run_id, rollout_id=rollout.rollout_id, **found))
    return events


class DurableBackend(ABC):
    """A backend that is closed once, and only in the process that opened it."""

    durable = True

    def __init__(self, name: str, stop: Callable[..., None], *resources: object) -> None:
        """Registers the resources to close.

        Args:
            name: the name of the database in messages.
            stop: called with ``resources`` when the backend is closed or no longer referenced.
            resources: the arguments of ``stop``, which must not refer to this backend.
        """
        self._name = name
        self._process_id = os.getpid()
        self._stop = weakref.finalize(self, _stop_here, self._process_id, stop, *resources)

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return bool(await self._write(Commit.encoded(writes, guards, events)))

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        claimed: Sequence[Rollout] = await self._write(Claiming(run_id, limit, decide))
        return claimed

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored: Sequence[Span | None] = await self._write(Append.encoded(spans, now))
        return stored

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not attempts:
            return []
        numbers: Sequence[int] = await self._write(TakeNumbers(attempts))
        return numbers

    @abstractmethod
    def _submit(self, work: Work) -> asyncio.Future[Any]:
        """Hands work to the thread that writes; the result is set once it is durable."""

    def _write(self, work: Work) -> asyncio.Future[Any]:
        self._check_open()
        return self._submit(work)

    async def close(self) -> None:
        """Finishes the calls that have begun and closes the database."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Closes the database, as ``close`` does, for callers without an event loop."""
        self._stop()

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StoreError(f"{self._name} is closed")
        if os.getpid() != self._process_id:
            raise StoreError(
                f"{self._name} was opened before this process was forked; connections do not survive that. Open the "
                "store in this process"
            )


def count_all(rows: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Returns the result of ``Backend.count``, given the rows of ``COUNT``."""
    found = {name: int(number) for name, number in rows}
    return {name: found.get(name, 0) for name in ("rollouts", "attempts", "spans", "resources", "workers")}


def _stop_here(process_id: int, stop: Callable[..., None], *resources: object) -> None:
    if os.getpid() == process_id:  # a forked child has neither the threads nor a right to the connections
        stop(*resources)


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
