"""Delivers spans to the store in the background."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.records import Span
from agentlightning.store.protocol import LightningStore
from agentlightning.store.quota import estimate_bytes
from agentlightning.store.waiting import Signal, deadline_after, running_loop

logger = logging.getLogger("agentlightning")

T = TypeVar("T")
MAX_BYTES: Final = 64 * 2**20
AttemptKey: TypeAlias = tuple[str, str]
"""Rollout id and attempt id."""

_BATCH_BYTES: Final = 4 * 2**20
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_FAILURES_UNTIL_APART: Final = 5
"""After this many failed writes of an attempt's spans, each is written separately, because one may be the cause."""


class _Item(NamedTuple):
    number: int
    """Number of the span in the order of ``put``, from 1."""
    span: Span
    size: int


@dataclass(slots=True)
class _Lane:
    """The spans of an attempt that are not stored yet, in the order of ``put``; never empty."""

    items: deque[_Item]
    failed_at: float | None = None
    """``time.monotonic()`` of the first failed write. Until a write succeeds, these spans are written separately."""
    failures: int = 0
    """Number of consecutive failed writes of only this attempt's spans."""
    retry_at: float = 0.0


class SpanWriter:
    """A bounded queue in front of a store, emptied in batches by a thread.

    ``put`` never waits: spans that do not fit are dropped and counted for their attempt. Spans of an attempt reach the
    store in the order of ``put``. A write that fails is tried again, and does not delay the spans of other attempts.
    Spans that the store refuses, such as spans of an unknown attempt, are dropped and counted; the other spans of the
    batch are stored.
    """

    _shared: Final[dict[int, tuple[SpanWriter, int]]] = {}
    _shared_lock: Final = threading.Lock()

    def __init__(
        self,
        store: LightningStore,
        *,
        max_bytes: int = MAX_BYTES,
        max_batch: int = 512,
        max_delay_s: float = 0.02,
        give_up_s: float = 120.0,
    ) -> None:
        """Makes a writer; its thread starts with the first span.

        Args:
            store: where spans are written. A store that is not thread-safe is called on the event loop from which
                ``bind_loop`` or ``flush`` is called first.
            max_bytes: how much may be queued, by a rough estimate of the size of each span.
            max_batch: maximum number of spans in one write.
            max_delay_s: how long a span may wait to share a write with others; ``flush`` ends this wait.
            give_up_s: how long a failing write is tried again before its spans are dropped.
        """
        self.store = store
        self._max_bytes = max_bytes
        self._max_batch = max_batch
        self._max_delay_s = max_delay_s
        self._give_up_s = give_up_s
        self._changed = threading.Condition(threading.Lock())
        self._bytes = 0
        self._last_put = 0
        self._lanes: dict[AttemptKey, _Lane] = {}
        self._dropped: Counter[AttemptKey] = Counter()
        self._reported: dict[AttemptKey, int] = {}
        self._waiters: list[tuple[int, AttemptKey | None, Signal]] = []
        self._thread: threading.Thread | None = None
        self._store_loop: asyncio.AbstractEventLoop | None = None
        self._is_idle = False
        self._is_closed = False

    @classmethod
    def shared(cls, store: LightningStore) -> SpanWriter:
        """Returns the only writer of this process for a store; call ``release`` when done."""
        with cls._shared_lock:
            writer, users = cls._shared.get(id(store)) or (cls(store), 0)
            cls._shared[id(store)] = writer, users + 1
            return writer

    def release(self) -> None:
        """Undoes one call of ``shared``; the last one closes the writer."""
        with self._shared_lock:
            users = self._shared.pop(id(self.store))[1] - 1
            if users:
                self._shared[id(self.store)] = self, users
        if not users:
            self.close()

    def put(self, span: Span) -> bool:
        """Takes a span, from any thread. Returns False if it was dropped."""
        key = (span.rollout_id, span.attempt_id)
        size = estimate_bytes(span)
        with self._changed:
            if self._is_closed or self._bytes + size > self._max_bytes:
                self._dropped[key] += 1
                return False
            # An agent's thread can be stopped at any bytecode: numbers and lanes stay consistent.
            self._last_put += 1
            item = _Item(self._last_put, span, size)
            if (lane := self._lanes.get(key)) is not None:
                lane.items.append(item)
            else:
                self._lanes[key] = _Lane(deque([item]))
            self._bytes += size
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="agl-spans", daemon=True)
                contextvars.Context().run(thread.start)  # not in the trace of the first attempt
                self._thread = thread
            elif self._is_idle:
                self._changed.notify()
        return True

    @property
    def queued(self) -> int:
        """Number of spans that are neither stored nor dropped yet."""
        with self._changed:
            return sum(len(lane.items) for lane in self._lanes.values())

    @property
    def lost(self) -> int:
        """Number of spans of all attempts that were dropped so far."""
        with self._changed:
            return self._dropped.total()

    def dropped(self, rollout_id: str, attempt_id: str) -> int:
        """Returns how many spans of an attempt were dropped so far."""
        with self._changed:
            return self._dropped[rollout_id, attempt_id]

    def undelivered(self, rollout_id: str, attempt_id: str) -> int:
        """Returns how many spans of an attempt are not in the store: dropped, or still queued."""
        key = (rollout_id, attempt_id)
        with self._changed:
            return self._dropped[key] + (len(self._lanes[key].items) if key in self._lanes else 0)

    def bind_loop(self) -> None:
        """Makes the running event loop the loop on which a store is called if it is not thread-safe."""
        if self._store_loop is None and not self.store.capabilities["thread_safe"]:
            self._store_loop = asyncio.get_running_loop()

    async def flush(
        self, rollout_id: str | None = None, attempt_id: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Waits until the spans put so far, of one attempt if ids are given, are stored, or dropped and counted.

        Without ids it also records on each attempt how many of its spans were dropped: the runner of an attempt counts
        only the losses of its own writer, not the losses of a gateway in another process. Returns False if
        ``timeout_s`` expires; None waits until all is done.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError(f"rollout_id={rollout_id!r}, attempt_id={attempt_id!r}: give both or neither")
        self.bind_loop()
        with self._changed:
            key = None if rollout_id is None or attempt_id is None else (rollout_id, attempt_id)
            is_done = not self._lanes if key is None else key not in self._lanes
            if not is_done:
                settled = Signal()
                self._waiters.append((self._last_put, key, settled))
                self._changed.notify()
        if not is_done and not await settled.wait(deadline_after(timeout_s)):
            return False
        if rollout_id is None:
            await self._report_losses()
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes the remaining spans, waiting for at most ``timeout_s``, and ends the thread; drops later spans."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return
        if self._store_loop is None or self._store_loop is not running_loop():  # the thread would wait for this loop
            thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("%d spans had not reached the store when its writer was closed", self.queued)

    def _run(self) -> None:
        with asyncio.Runner() as runner:  # one loop, so that the store can keep its connections
            while self._wait_for_spans():
                runner.run(self._deliver())

    def _wait_for_spans(self) -> bool:
        """Waits until there is something to write; returns False when it is closed and everything is done."""
        with self._changed:
            now = time.monotonic()
            waits_s = [max(0.0, lane.retry_at - now) for lane in self._lanes.values() if lane.failed_at is not None]
            self._is_idle = True
            self._changed.wait_for(lambda: self._is_closed or self._count_fresh(), min(waits_s, default=None))
            self._is_idle = False
            if self._count_fresh():
                self._changed.wait_for(
                    lambda: self._is_closed or self._waiters or self._count_fresh() >= self._max_batch,
                    self._max_delay_s,
                )
            return bool(self._lanes) or not self._is_closed

    def _count_fresh(self) -> int:
        """Returns how many spans wait for their first write."""
        return sum(len(lane.items) for lane in self._lanes.values() if lane.failed_at is None)

    def _take(self, lanes: Iterable[_Lane]) -> list[_Item]:
        """Returns the first spans of lanes, as many as fit into one write; the last may exceed the limit of bytes."""
        batch: list[_Item] = []
        size = 0
        for item in itertools.islice(itertools.chain.from_iterable(lane.items for lane in lanes), self._max_batch):
            if size >= _BATCH_BYTES:
                break
            batch.append(item)
            size += item.size
        return batch

    async def _deliver(self) -> None:
        """Writes the spans of all attempts together, but separately, when due, for each attempt whose write failed."""
        with self._changed:
            now = time.monotonic()
            fresh = [lane for lane in self._lanes.values() if lane.failed_at is None]
            batch = self._take(sorted(fresh, key=lambda lane: lane.items[0].number))
            due = [
                (lane, self._take([lane]))
                for lane in self._lanes.values()
                if lane.failed_at is not None and (lane.retry_at <= now or self._is_closed)
            ]
        if batch and await self._add(batch) is not None:
            with self._changed:
                for item in batch:
                    self._lanes[_key_of(item)].failed_at = now
        await asyncio.gather(*(self._retry(lane, items) for lane, items in due))

    async def _retry(self, lane: _Lane, items: list[_Item]) -> None:
        """Writes the first spans of a lane, after a failure."""
        error = await self._add(items)
        if error is None:
            lane.failed_at, lane.failures = None, 0
            return
        lane.failures += 1
        is_last = self._is_closed or time.monotonic() - (lane.failed_at or 0.0) >= self._give_up_s
        if is_last or not _is_transient(error) or lane.failures >= _FAILURES_UNTIL_APART:
            await self._add_apart(items, error)
        if is_last:
            with self._changed:
                left = list(lane.items)
            self._drop(left, error)
        lane.retry_at = time.monotonic() + min(_FIRST_PAUSE_S * 2 ** (lane.failures - 1), _LONGEST_PAUSE_S)

    async def _add_apart(self, items: list[_Item], error: Exception) -> None:
        """Stores spans of an attempt one by one, and drops those that the store refuses.

        It ends after two consecutive transient failures, because the store is the cause.
        """
        failures = 0
        for item in items:
            failure = error if len(items) == 1 else await self._add([item])
            failures = failures + 1 if failure is not None and _is_transient(failure) else 0
            if failure is not None and not failures:
                self._drop([item], failure)
            if failures == 2:
                return

    def _drop(self, items: list[_Item], error: Exception) -> None:
        if not items:
            return
        key = _key_of(items[0])
        with self._changed:
            before = self._dropped[key]
            self._dropped[key] += len(items)
            lost = self._dropped[key]
        if not before or len(str(before)) < len(str(lost)):  # the first, the 10th, the 100th, ...
            logger.warning("%d spans of attempt %s of rollout %s are lost so far: %s", lost, key[1], key[0], error)
        self._settle(items)

    def _settle(self, items: Iterable[_Item]) -> None:
        """Removes spans that were stored or dropped, and wakes the flushes that waited for them."""
        with self._changed:
            for item in items:
                lane = self._lanes[_key_of(item)]
                lane.items.remove(item)  # usually the first
                self._bytes -= item.size
                if not lane.items:
                    del self._lanes[_key_of(item)]
            done = [waiter for waiter in self._waiters if self._is_settled(waiter[0], waiter[1])]
            self._waiters = [waiter for waiter in self._waiters if waiter not in done]
        for _, _, signal in done:
            signal.set()

    def _is_settled(self, number: int, key: AttemptKey | None) -> bool:
        """Whether the spans of an attempt, or of all attempts, are stored or dropped up to a number."""
        lanes = self._lanes.values() if key is None else filter(None, [self._lanes.get(key)])
        return all(lane.items[0].number > number for lane in lanes)

    async def _report_losses(self) -> None:
        with self._changed:
            unreported = {key: count for key, count in self._dropped.items() if self._reported.get(key) != count}
        for (rollout_id, attempt_id), count in unreported.items():
            try:
                await self._call(self.store.update_attempt(rollout_id, attempt_id, spans_dropped=count))
            except NotFoundError:  # its spans were dropped because there is no such attempt
                pass
            except (StoreError, OSError) as error:
                logger.warning("the loss of %d spans of attempt %s was not recorded: %s", count, attempt_id, error)
                continue
            self._reported[rollout_id, attempt_id] = count

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Awaits a call of the store, on its own event loop if it is bound to one."""
        loop = self._store_loop
        if loop is None or loop is running_loop():
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

    async def _add(self, items: Sequence[_Item]) -> Exception | None:
        """Stores spans; returns the error if they could not be stored."""
        try:
            await self._call(self.store.add_many_spans([item.span for item in items]))
        except Exception as error:  # isolation point: an error of the store must not end the thread
            return error
        self._settle(items)
        return None


def _key_of(item: _Item) -> AttemptKey:
    return item.span.rollout_id, item.span.attempt_id


def _is_transient(error: Exception) -> bool:
    """Whether the same write may succeed later."""
    return isinstance(error, (StoreError, OSError)) and not isinstance(error, NotFoundError)
