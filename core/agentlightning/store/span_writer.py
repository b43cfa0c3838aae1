"""Takes spans off an agent's hands and brings them to the store."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_size import estimate_bytes
from agentlightning.store.waiting import Bell, deadline_after
from agentlightning.types import Span

logger = logging.getLogger("agentlightning")

T = TypeVar("T")
MAX_BYTES: Final = 64 * 2**20
AttemptKey: TypeAlias = tuple[str, str]
"""Rollout id and attempt id."""

_BATCH_BYTES: Final = 4 * 2**20
_HERE_BYTES: Final = 2**18
"""What an event loop may be asked to write itself, at most."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_CONFLICT_S: Final = 0.5
"""How long races with other writers may be lost before somebody else's spans are tried."""


class _Item(NamedTuple):
    number: int
    """From 1, in the order of ``put``; items are settled (stored or dropped) in the same order."""
    span: Span
    size: int


@dataclass(slots=True)
class _Underway:
    """The spans of one attempt that are neither stored nor dropped yet."""

    last_number: int
    count: int


class SpanWriter:
    """A bounded queue in front of a store, emptied in batches by a thread of its own, or by who waits for it.

    ``put`` never waits: what does not fit is dropped and counted for its attempt. Spans reach the store in the order in
    which they were put. While the store fails, a batch is tried again; spans that the store refuses, as those of an
    unknown attempt, are dropped and counted without harm to the others.
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
            store: where spans go. One that is not thread-safe is called on the event loop that ``bind_loop`` or
                ``flush`` is called from first.
            max_bytes: what may be under way, by a rough estimate of each span.
            max_batch: spans in one write.
            max_delay_s: how long a span may wait for others to share a write with; ``flush`` cuts it short.
            give_up_s: for how long a failing write is tried again before its spans are dropped.
        """
        self._store = store
        self._max_bytes = max_bytes
        self._max_batch = max_batch
        self._max_delay_s = max_delay_s
        self._give_up_s = give_up_s
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Item] = deque()
        self._bytes = 0
        self._last_put = 0
        self._last_settled = 0
        self._underway: dict[AttemptKey, _Underway] = {}
        self._dropped: Counter[AttemptKey] = Counter()
        self._told: dict[AttemptKey, int] = {}
        self._waiters: list[tuple[int, Bell]] = []
        self._thread: threading.Thread | None = None
        self._store_loop: asyncio.AbstractEventLoop | None = None
        self._is_idle = False
        self._is_writing = False
        """Whether somebody writes: the thread or the task, never both, so that spans keep their order."""
        self._task: asyncio.Task[None] | None = None
        self._task_batch: list[_Item] = []
        self._is_closed = False

    @classmethod
    def shared(cls, store: LightningStore) -> SpanWriter:
        """The one writer of this process for a store; give it back with ``release``."""
        with cls._shared_lock:
            writer, users = cls._shared.get(id(store)) or (cls(store), 0)
            cls._shared[id(store)] = writer, users + 1
            return writer

    def release(self) -> None:
        """Gives back what ``shared`` gave; the last user's closes the writer."""
        with self._shared_lock:
            users = self._shared.pop(id(self._store))[1] - 1
            if users:
                self._shared[id(self._store)] = self, users
        if not users:
            self.close()

    @property
    def store(self) -> LightningStore:
        """Where the spans go."""
        return self._store

    def put(self, span: Span) -> bool:
        """Takes a span, from any thread. False when it had to be dropped."""
        key = (span.rollout_id, span.attempt_id)
        size = estimate_bytes(span)
        with self._changed:
            if self._is_closed or self._bytes + size > self._max_bytes:
                self._dropped[key] += 1
                return False
            number = self._last_put + 1
            # An agent's thread can be stopped at any bytecode: numbers go with the items, so that no count can shift.
            self._queue.append(_Item(number, span, size))
            self._last_put = number
            self._bytes += size
            underway = self._underway.get(key)
            if underway is None:
                self._underway[key] = _Underway(number, 1)
            else:
                underway.last_number = number
                underway.count += 1
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="agl-spans", daemon=True)
                contextvars.Context().run(thread.start)  # it must not seem to be part of the first attempt
                self._thread = thread
            elif (self._is_idle and not self._is_writing) or len(self._queue) == self._max_batch:
                self._changed.notify()
        return True

    @property
    def queued(self) -> int:
        """How many spans are on their way to the store."""
        return self._last_put - self._last_settled

    @property
    def lost(self) -> int:
        """How many spans of all attempts were lost so far."""
        with self._changed:
            return self._dropped.total()

    def dropped(self, rollout_id: str, attempt_id: str) -> int:
        """How many spans of an attempt were lost so far."""
        with self._changed:
            return self._dropped[rollout_id, attempt_id]

    def undelivered(self, rollout_id: str, attempt_id: str) -> int:
        """How many spans of an attempt are not in the store: lost, or still under way."""
        key = (rollout_id, attempt_id)
        with self._changed:
            underway = self._underway.get(key)
            return self._dropped[key] + (underway.count if underway is not None else 0)

    def bind_loop(self) -> None:
        """Remembers the running event loop as the home of a store that is not thread-safe."""
        if self._store_loop is None and not self._store.capabilities["thread_safe"]:
            self._store_loop = asyncio.get_running_loop()

    async def flush(
        self, rollout_id: str | None = None, attempt_id: str | None = None, *, timeout_s: float | None = None
    ) -> bool:
        """Waits until the spans put so far are stored, or dropped and counted.

        Waiting for all attempts also writes to each how many of its spans were lost: whoever runs an attempt knows of
        its own writer only, and a gateway in another process has one too.

        Args:
            rollout_id: with ``attempt_id``: waits for one attempt only.
            attempt_id: see ``rollout_id``.
            timeout_s: None waits for as long as it takes.

        Returns:
            False when the time ran out.
        """
        if not await self._wait_until_settled(rollout_id, attempt_id, timeout_s):
            return False
        if rollout_id is None:
            await self._tell_losses()
        return True

    async def _wait_until_settled(
        self, rollout_id: str | None, attempt_id: str | None, timeout_s: float | None
    ) -> bool:
        self.bind_loop()
        settled = Bell()
        with self._changed:
            number = self._last_put
            if rollout_id is not None and attempt_id is not None:
                underway = self._underway.get((rollout_id, attempt_id))
                number = underway.last_number if underway is not None else 0
            if number <= self._last_settled:
                return True
            self._waiters.append((number, settled))
            if self._is_writing or self._bytes > _HERE_BYTES:
                self._changed.notify()
            else:
                self._is_writing = True
                context = contextvars.Context()  # as of the thread
                self._task = asyncio.get_running_loop().create_task(self._write_here(), context=context)
                self._task.add_done_callback(self._replace_task)
        return await settled.wait(deadline_after(timeout_s))

    async def _write_here(self) -> None:
        """Writes while somebody waits, in the loop of who does: a thread would have to fight for the interpreter."""
        while batch := self._next_batch_here():
            await self._deliver([item.span for item in batch])
            self._settle(batch)

    def _next_batch_here(self) -> list[_Item]:
        with self._changed:
            if self._waiters and self._bytes <= _HERE_BYTES:
                self._task_batch = self._take()
            else:
                self._leave_to_thread()
            return self._task_batch

    def _replace_task(self, task: asyncio.Task[None]) -> None:
        """Has the thread write what a task has left behind that was cancelled."""
        with self._changed:
            if task is self._task:
                self._leave_to_thread()

    def _leave_to_thread(self) -> None:
        self._queue.extendleft(reversed(self._task_batch))  # what is stored already the store leaves out
        self._task, self._task_batch, self._is_writing = None, [], False
        if self._queue or self._is_closed:
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is left, waiting for at most ``timeout_s``, and ends the thread; later spans are dropped."""
        with self._changed:
            self._is_closed = True
            if self._task is not None and self._task.get_loop() is _running_loop():  # where it would wait for us
                self._task.cancel()
                self._leave_to_thread()
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return
        if self._store_loop is None or self._store_loop is not _running_loop():  # else it would wait for us
            thread.join(timeout_s)
        if thread.is_alive():
            with self._changed:
                self._queue.clear()
                left = self._last_put - self._last_settled
            logger.warning("%d spans had not reached the store when it was closed", left)

    def _work(self) -> None:
        with asyncio.Runner() as runner:  # one loop, so that the store can keep its connections
            while batch := self._next_batch():
                runner.run(self._deliver([item.span for item in batch]))
                self._settle(batch)

    def _next_batch(self) -> list[_Item]:
        """Waits for spans and takes the oldest; none when the writer was closed and all are settled."""
        with self._changed:
            while True:
                self._is_idle = True
                self._changed.wait_for(lambda: not self._is_writing and (self._queue or self._is_closed))
                self._is_idle = False
                self._changed.wait_for(
                    lambda: len(self._queue) >= self._max_batch or self._waiters or self._is_closed, self._max_delay_s
                )
                if not self._is_writing and (self._queue or self._is_closed):
                    self._is_writing = bool(self._queue)
                    return self._take()

    def _take(self) -> list[_Item]:
        batch: list[_Item] = []
        size = 0
        while self._queue and len(batch) < self._max_batch and (not batch or size < _BATCH_BYTES):
            batch.append(self._queue.popleft())
            size += batch[-1].size
        return batch

    def _settle(self, batch: Sequence[_Item]) -> None:
        with self._changed:
            if self._task is None:
                self._is_writing = False
            self._task_batch = []
            self._last_settled = batch[-1].number
            for item in batch:
                self._bytes -= item.size
                key = (item.span.rollout_id, item.span.attempt_id)
                underway = self._underway.get(key)
                if underway is not None:
                    underway.count -= 1
                    if underway.count == 0:
                        del self._underway[key]
            done = [bell for number, bell in self._waiters if number <= self._last_settled]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > self._last_settled]
        for bell in done:
            bell.ring()

    async def _deliver(self, spans: list[Span]) -> None:
        """Brings spans to the store or counts them as dropped: all at once, else by attempt, else one by one."""
        error = await self._add(spans, self._give_up_s)
        if error is None:
            return
        # A store that has failed for so long gets one more try for each part: one of them may be what it chokes on.
        retry_s = 0.0 if _is_passing(error) else self._give_up_s
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

    async def _tell_losses(self) -> None:
        with self._changed:
            news = {key: count for key, count in self._dropped.items() if self._told.get(key) != count}
        for (rollout_id, attempt_id), count in news.items():
            try:
                await self._at_home(self._store.update_attempt(rollout_id, attempt_id, spans_dropped=count))
            except NotFoundError:  # its spans were lost because there is no such attempt
                pass
            except (StoreError, OSError) as error:
                logger.warning("the loss of %d spans of attempt %s was not noted: %s", count, attempt_id, error)
                continue
            self._told[rollout_id, attempt_id] = count

    async def _at_home(self, call: Coroutine[Any, Any, T]) -> T:
        """Awaits a call of the store where the store lives."""
        loop = self._store_loop
        if loop is None or loop is _running_loop():
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))

    async def _add(self, spans: Sequence[Span], retry_s: float) -> Exception | None:
        """Stores spans, trying again while the store fails; returns why that was not to be."""
        began = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._at_home(self._add_to_store(spans))
                return None
            except Exception as error:  # isolation point: whatever the store raises must not end the thread
                patience_s = min(retry_s, _CONFLICT_S) if isinstance(error, ConflictError) else retry_s
                if not _is_passing(error) or time.monotonic() - began >= patience_s or self._is_closed:
                    return error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _add_to_store(self, spans: Sequence[Span]) -> None:
        await self._store.add_many_spans(spans)


def _is_passing(error: Exception) -> bool:
    """Whether the same write may succeed later."""
    return isinstance(error, (StoreError, OSError)) and not isinstance(error, NotFoundError)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
