"""Delivers spans to the store in the background."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.store.protocol import LightningStore
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
_CONFLICT_S: Final = 0.5
"""How long a write that conflicts with other writers is tried before the spans of other attempts."""


class _Item(NamedTuple):
    number: int
    """From 1, in the order of ``put``; items are settled (stored or dropped) in the same order."""
    span: Span
    size: int

    @property
    def attempt(self) -> AttemptKey:
        return self.span.rollout_id, self.span.attempt_id


class SpanWriter:
    """A bounded queue in front of a store, emptied in batches by a thread.

    ``put`` never waits: spans that do not fit are dropped and counted for their attempt. Spans reach the store in the
    order of ``put``. While the store fails, a batch is tried again. Spans that the store refuses, such as those of an
    unknown attempt, are dropped and counted; the others of their batch are stored.
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
        self._last_settled = 0
        self._pending: Counter[AttemptKey] = Counter()
        self._dropped: Counter[AttemptKey] = Counter()
        self._reported: dict[AttemptKey, int] = {}
        self._waiters: list[tuple[int, Signal]] = []
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
        return self._last_put - self._last_settled

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
        """Waits until the spans put so far are stored, or dropped and counted.

        Without ids it also writes to each attempt how many of its spans were dropped: the runner of an attempt knows
        only the losses of its own writer, not those of a gateway in another process.

        Args:
            rollout_id: with ``attempt_id``: returns at once if no span of this attempt is queued.
            attempt_id: see ``rollout_id``.
            timeout_s: how long to wait; None: until it is done.

        Returns:
            False when the time ran out.
        """
        self.bind_loop()
        with self._changed:
            is_done = self._last_put == self._last_settled
            if rollout_id is not None and attempt_id is not None:
                is_done = not self._pending[rollout_id, attempt_id]
            if not is_done:
                settled = Signal()
                self._waiters.append((self._last_put, settled))
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
                left = self._last_put - self._last_settled
            logger.warning("%d spans had not reached the store when its writer was closed", left)

    def _run(self) -> None:
        with asyncio.Runner() as runner:  # one loop, so that the store can keep its connections
            while batch := self._next_batch():
                runner.run(self._deliver([item.span for item in batch]))
                self._settle(batch)

    def _next_batch(self) -> list[_Item]:
        """Waits for spans and takes the oldest; none when the writer is closed and the queue empty."""
        with self._changed:
            self._is_idle = True
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            self._is_idle = False
            self._changed.wait_for(
                lambda: len(self._queue) >= self._max_batch or self._waiters or self._is_closed, self._max_delay_s
            )
            batch: list[_Item] = []
            size = 0
            while self._queue and len(batch) < self._max_batch and (not batch or size < _BATCH_BYTES):
                batch.append(self._queue.popleft())
                size += batch[-1].size
            return batch

    def _settle(self, batch: Sequence[_Item]) -> None:
        with self._changed:
            self._last_settled = batch[-1].number
            for item in batch:
                self._bytes -= item.size
                self._pending[item.attempt] -= 1
                if not self._pending[item.attempt]:
                    del self._pending[item.attempt]
            done = [signal for number, signal in self._waiters if number <= self._last_settled]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > self._last_settled]
        for signal in done:
            signal.set()

    async def _deliver(self, spans: list[Span]) -> None:
        """Stores spans or counts them as dropped: all at once, else by attempt, else one by one."""
        error = await self._add(spans, self._give_up_s)
        if error is None:
            return
        # After a store failed for give_up_s, each part is tried once more: a single span may be the cause.
        retry_s = 0.0 if _is_transient(error) else self._give_up_s
        by_attempt: dict[AttemptKey, list[Span]] = {}
        for span in spans:
            by_attempt.setdefault((span.rollout_id, span.attempt_id), []).append(span)
        for key, own in by_attempt.items():
            error = await self._add(own, retry_s)
            lost = len(own) if error is not None else 0
            if error is not None and len(own) > 1 and not isinstance(error, (StoreError, OSError)):
                lost = sum([await self._add([span], retry_s) is not None for span in own])
            if lost:
                with self._changed:
                    self._dropped[key] += lost
                logger.warning("%d spans of attempt %s of rollout %s are lost: %s", lost, key[1], key[0], error)

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

    async def _add(self, spans: Sequence[Span], retry_s: float) -> Exception | None:
        """Stores spans, trying again while the store fails; returns the error if they could not be stored."""
        began = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._call(self._add_to_store(spans))
                return None
            except Exception as error:  # isolation point: an error of the store must not end the thread
                limit_s = min(retry_s, _CONFLICT_S) if isinstance(error, ConflictError) else retry_s
                if not _is_transient(error) or time.monotonic() - began >= limit_s or self._is_closed:
                    return error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _add_to_store(self, spans: Sequence[Span]) -> None:
        await self.store.add_many_spans(spans)


def _is_transient(error: Exception) -> bool:
    """Whether the same write may succeed later."""
    return isinstance(error, (StoreError, OSError)) and not isinstance(error, NotFoundError)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def estimate_bytes(span: Span) -> int:
    """Roughly how much memory a span takes: exact enough for a bound, and much cheaper than serializing it."""
    size = 500
    for name, value in span.attributes.items():
        size += len(name) + (len(value) if type(value) is str else _estimate_value(value))
    for event in span.events:
        size += 200 + sum(len(name) + _estimate_value(value) for name, value in event.attributes.items())
    return size


def _estimate_value(value: object) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float)):
            return 8 * len(value)
        return sum(8 + _estimate_value(item) for item in value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _estimate_value(item) for key, item in value.items())
    return 8
