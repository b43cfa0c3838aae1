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

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_size import estimate_bytes
from agentlightning.store.waiting import Signal, deadline_after
from agentlightning.types import Span

logger = logging.getLogger("agentlightning")

T = TypeVar("T")
MAX_BYTES: Final = 64 * 2**20
AttemptKey: TypeAlias = tuple[str, str]
"""Rollout id and attempt id."""

_BATCH_BYTES: Final = 4 * 2**20
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_FAILURES_UNTIL_APART: Final = 5
"""Failed writes of an attempt's spans until each span is written alone, because one may be the cause."""


class _Item(NamedTuple):
    number: int
    """From 1, in the order of ``put``."""
    span: Span
    size: int

    @property
    def attempt(self) -> AttemptKey:
        return self.span.rollout_id, self.span.attempt_id


@dataclass(slots=True)
class _Lane:
    """The spans of an attempt whose write failed. They wait for another try, and later ones behind them."""

    items: list[_Item]
    failed_at: float
    """``time.monotonic()`` of the first failure."""
    retry_at: float
    failures: int = 1
    """In a row."""


class SpanWriter:
    """A bounded queue in front of a store, emptied in batches by a thread.

    ``put`` never waits: spans that do not fit are dropped and counted for their attempt. Spans of an attempt reach the
    store in the order of ``put``. While their write fails, it is tried again, and the spans of other attempts go on.
    Spans that the store refuses, such as those of an unknown attempt, are dropped and counted; the others of their
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
            store: where spans go. If it is not thread-safe, it is called on the event loop that ``bind_loop`` or
                ``flush`` is called from first.
            max_bytes: how much may be queued, by a rough estimate of each span.
            max_batch: spans in one write.
            max_delay_s: how long a span may wait to share a write with others; ``flush`` ends this wait.
            give_up_s: how long a failing write is tried again before its spans are dropped.
        """
        self.store = store
        self._max_bytes = max_bytes
        self._max_batch = max_batch
        self._max_delay_s = max_delay_s
        self._give_up_s = give_up_s
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Item] = deque()
        self._bytes = 0
        self._last_put = 0
        self._last_written = 0
        """The number of the last item that was stored, dropped or moved to a lane."""
        self._lanes: dict[AttemptKey, _Lane] = {}
        """By attempt; changed by the thread only."""
        self._pending: Counter[AttemptKey] = Counter()
        self._dropped: Counter[AttemptKey] = Counter()
        self._reported: dict[AttemptKey, int] = {}
        self._waiters: list[tuple[int, AttemptKey | None, Signal]] = []
        self._thread: threading.Thread | None = None
        self._store_loop: asyncio.AbstractEventLoop | None = None
        self._is_idle = False
        self._is_closed = False

    @classmethod
    def shared(cls, store: LightningStore) -> SpanWriter:
        """The one writer of this process for a store; call ``release`` when done."""
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
            number = self._last_put + 1
            # An agent's thread can be stopped at any bytecode: the item carries its number, so that no count can shift.
            self._queue.append(_Item(number, span, size))
            self._last_put = number
            self._bytes += size
            self._pending[key] += 1
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="agl-spans", daemon=True)
                contextvars.Context().run(thread.start)  # not in the trace of the first attempt
                self._thread = thread
            elif self._is_idle or len(self._queue) == self._max_batch:
                self._changed.notify()
        return True

    @property
    def queued(self) -> int:
        """How many spans are neither stored nor dropped yet."""
        return self._last_put - self._last_written + sum(len(lane.items) for lane in list(self._lanes.values()))

    @property
    def lost(self) -> int:
        """How many spans of all attempts were dropped so far."""
        with self._changed:
            return self._dropped.total()

    def dropped(self, rollout_id: str, attempt_id: str) -> int:
        """How many spans of an attempt were dropped so far."""
        with self._changed:
            return self._dropped[rollout_id, attempt_id]

    def undelivered(self, rollout_id: str, attempt_id: str) -> int:
        """How many spans of an attempt are not in the store: dropped, or still queued."""
        key = (rollout_id, attempt_id)
        with self._changed:
            return self._dropped[key] + self._pending[key]

    def bind_loop(self) -> None:
        """Makes the running event loop the one that a store that is not thread-safe is called on."""
        if self._store_loop is None and not self.store.capabilities["thread_safe"]:
            self._store_loop = asyncio.get_running_loop()

    async def flush(
        self, rollout_id: str | None = None, attempt_id: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Waits until the spans put so far, with ids those of one attempt, are stored, or dropped and counted.

        Without ids it also writes to each attempt how many of its spans were dropped: the runner of an attempt knows
        only the losses of its own writer, not those of a gateway in another process. Returns False when ``timeout_s``
        ran out; None waits until it is done.
        """
        self.bind_loop()
        with self._changed:
            key = None if rollout_id is None or attempt_id is None else (rollout_id, attempt_id)
            is_done = not self.queued if key is None else not self._pending[key]
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
        """Writes what is left, waiting for at most ``timeout_s``, and ends the thread; later spans are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return
        if self._store_loop is None or self._store_loop is not _running_loop():  # the thread would wait for this loop
            thread.join(timeout_s)
        if thread.is_alive():
            with self._changed:
                self._queue.clear()
                left = self.queued
            logger.warning("%d spans had not reached the store when its writer was closed", left)

    def _run(self) -> None:
        with asyncio.Runner() as runner:  # one loop, so that the store can keep its connections
            while (batch := self._next_batch()) is not None:
                runner.run(self._deliver(batch))

    def _next_batch(self) -> list[_Item] | None:
        """Waits for spans and takes the oldest; none if a lane is due; None when it is closed and all is done."""
        with self._changed:
            self._is_idle = True
            due_at = min((lane.retry_at for lane in self._lanes.values()), default=None)
            wait_s = None if due_at is None else max(0.0, due_at - time.monotonic())
            self._changed.wait_for(lambda: self._queue or self._is_closed, wait_s)
            self._is_idle = False
            if self._queue:
                self._changed.wait_for(
                    lambda: len(self._queue) >= self._max_batch or self._waiters or self._is_closed, self._max_delay_s
                )
            elif self._is_closed and not self._lanes:
                return None
            return [self._queue.popleft() for _ in range(self._batch_length(self._queue))]

    def _batch_length(self, items: Iterable[_Item]) -> int:
        """How many of the first items one write takes: those that begin within the limit of bytes."""
        length = size = 0
        for item in itertools.islice(items, self._max_batch):
            if size >= _BATCH_BYTES:
                break
            length += 1
            size += item.size
        return length

    async def _deliver(self, batch: list[_Item]) -> None:
        """Stores spans, puts them into lanes or drops them; then tries the lanes that are due."""
        fresh: dict[AttemptKey, list[_Item]] = {}
        for item in batch:
            lane = self._lanes.get(item.attempt)
            (fresh.setdefault(item.attempt, []) if lane is None else lane.items).append(item)
        error = await self._add([item for item in batch if item.attempt in fresh])
        if error is None:
            self._settle(item for item in batch if item.attempt in fresh)
        else:
            shared = error if len(fresh) == 1 else None
            await asyncio.gather(*(self._open_lane(key, own, shared) for key, own in fresh.items()))
        if batch:
            self._last_written = batch[-1].number
            self._wake()
        now = time.monotonic()
        due = [key for key, lane in self._lanes.items() if lane.retry_at <= now or self._is_closed]
        await asyncio.gather(*map(self._retry, due))

    async def _open_lane(self, key: AttemptKey, items: list[_Item], error: Exception | None) -> None:
        """Stores the spans of one attempt after a batch failed, or opens a lane for them.

        ``error`` is the one that they failed with, None if they were not alone in the batch.
        """
        error = error or await self._add(items)
        if error is None:
            self._settle(items)
            return
        left = items if _is_transient(error) else await self._add_apart(items, error)
        if self._is_closed:
            self._drop(left, error)
        elif left:
            now = time.monotonic()
            self._lanes[key] = _Lane(left, now, now + _FIRST_PAUSE_S)

    async def _retry(self, key: AttemptKey) -> None:
        """Tries the first spans of a lane again; closes the lane if it is empty then."""
        lane = self._lanes[key]
        count = self._batch_length(lane.items)
        items, rest = lane.items[:count], lane.items[count:]
        error = await self._add(items)
        if error is None:
            self._settle(items)
            lane.items, lane.failures = rest, 0
        else:
            lane.failures += 1
            is_last = self._is_closed or time.monotonic() - lane.failed_at >= self._give_up_s
            if is_last or not _is_transient(error) or lane.failures >= _FAILURES_UNTIL_APART:
                lane.items = await self._add_apart(items, error) + rest
            if is_last:
                self._drop(lane.items, error)
                lane.items = []
        pause_s = min(_FIRST_PAUSE_S * 2 ** (lane.failures - 1), _LONGEST_PAUSE_S)
        lane.retry_at = time.monotonic() + pause_s if lane.failures else 0.0
        if not lane.items:
            del self._lanes[key]
        self._wake()

    async def _add_apart(self, items: list[_Item], error: Exception) -> list[_Item]:
        """Stores spans of an attempt one by one, and drops those that the store refuses.

        Returns those that may be stored later: it ends after two failures in a row, because the store is the cause.
        """
        left: list[_Item] = []
        failures = 0
        for position, item in enumerate(items):
            failure = error if len(items) == 1 else await self._add([item])
            if failure is None:
                self._settle([item])
                failures = 0
            elif not _is_transient(failure):
                self._drop([item], failure)
                failures = 0
            else:
                left.append(item)
                failures += 1
            if failures == 2:
                return left + items[position + 1 :]
        return left

    def _drop(self, items: list[_Item], error: Exception) -> None:
        if not items:
            return
        key = items[0].attempt
        with self._changed:
            self._dropped[key] += len(items)
        logger.warning("%d spans of attempt %s of rollout %s are lost: %s", len(items), key[1], key[0], error)
        self._settle(items)

    def _settle(self, items: Iterable[_Item]) -> None:
        with self._changed:
            for item in items:
                self._bytes -= item.size
                self._pending[item.attempt] -= 1
                if not self._pending[item.attempt]:
                    del self._pending[item.attempt]

    def _wake(self) -> None:
        """Wakes the flushes whose spans are stored or dropped."""
        with self._changed:
            done = [waiter for waiter in self._waiters if self._is_settled(waiter[0], waiter[1])]
            self._waiters = [waiter for waiter in self._waiters if waiter not in done]
        for _, _, signal in done:
            signal.set()

    def _is_settled(self, number: int, key: AttemptKey | None) -> bool:
        """Whether the spans of an attempt, or of all, are settled up to a number."""
        if self._last_written < number:
            return False
        lanes = self._lanes.values() if key is None else filter(None, [self._lanes.get(key)])
        return all(lane.items[0].number > number for lane in lanes if lane.items)

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
        if loop is None or loop is _running_loop():
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

    async def _add(self, items: Sequence[_Item]) -> Exception | None:
        """Stores spans; returns the error if they could not be stored."""
        if not items:
            return None
        try:
            await self._call(self.store.add_many_spans([item.span for item in items]))
        except Exception as error:  # isolation point: an error of the store must not end the thread
            return error
        return None


def _is_transient(error: Exception) -> bool:
    """Whether the same write may succeed later."""
    return isinstance(error, (StoreError, OSError)) and not isinstance(error, NotFoundError)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
