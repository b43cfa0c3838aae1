"""The store ``memory://``: records in the memory of this process."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NoReturn, Self, TypeVar, cast

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Claim, Delete, Guard, Key, Listener, Page, Put, Query, Write, key_of
from agentlightning.store.engine import BackendStore
from agentlightning.store.engine.database import LIVE
from agentlightning.store.url import hide_password
from agentlightning.types import DEFAULT_RUN_ID, LIVE_ATTEMPT, Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.memory.table import Index, Positions, Table
from agentlightning_plugins.stores.shared.clock import ServerClock
from agentlightning_plugins.stores.shared.watchers import Watchers

R = TypeVar("R", bound=Record)

_QUEUED: Final = frozenset({"queuing", "requeuing"})


class _Queue:
    """The queued rollouts of a run, in the order in which they are claimed."""

    def __init__(self) -> None:
        self.by_priority: dict[int, OrderedDict[str, None]] = {}
        self._order: list[int] = []
        """The priorities of queued rollouts, negated: the highest is the first."""

    def __iter__(self) -> Iterator[str]:
        for negated in self._order:
            yield from self.by_priority[-negated]

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, rollout: Rollout) -> None:
        if rollout.priority not in self.by_priority:
            self.by_priority[rollout.priority] = OrderedDict()
            insort(self._order, -rollout.priority)
        self.by_priority[rollout.priority][rollout.rollout_id] = None

    def remove(self, rollout: Rollout) -> None:
        equal = self.by_priority.get(rollout.priority, OrderedDict())
        equal.pop(rollout.rollout_id, None)
        if not equal and self.by_priority.pop(rollout.priority, None) is not None:
            del self._order[bisect_left(self._order, -rollout.priority)]


class MemoryBackend:
    """A backend of plain Python objects, for one process.

    One lock is held for the time of a few dictionary operations. Records are immutable, so they are stored and returned
    as they are. The cost of claiming, appending, waiting and lookups by id, status, run or rollout does not grow with
    the number of records.
    """

    durable = False

    def __init__(self) -> None:
        self._clock = ServerClock("memory://")  # keeps its pace when the machine's clock is set
        self._lock = threading.Lock()
        self._rollouts = Table(
            Rollout,
            self._lock,
            Index("metadata.task_id"),
            Index("metadata.group"),
            Index("metadata.step"),
            Index("run_id", "status"),
            Index("run_id", constant=True),
        )
        self._attempts_of = Index("rollout_id", constant=True)
        self._attempts = Table(
            Attempt,
            self._lock,
            self._attempts_of,
            Index("worker_id", "status", only=LIVE_ATTEMPT),
            Index("status", only=LIVE_ATTEMPT),
        )
        self._spans_of = Index("rollout_id", constant=True)
        self._spans = Table(
            Span, self._lock, self._spans_of, Index("run_id", constant=True), readers={"run_id": self._run_of}
        )
        resources = Index("resources_id", constant=True), Index("run_id", constant=True)
        self._tables: dict[type[Record], Table[Any]] = {
            Run: Table(Run, self._lock),
            Rollout: self._rollouts,
            Attempt: self._attempts,
            Span: self._spans,
            ResourcesUpdate: Table(ResourcesUpdate, self._lock, *resources),
            Worker: Table(Worker, self._lock),
            Metrics: Table(Metrics, self._lock, Index("run_id", constant=True)),
        }
        self._queues: dict[str, _Queue] = {}
        self._last_sequence_ids: dict[Key, int] = {}
        self._watchers = Watchers("memory://")
        self._undelivered: deque[Sequence[Event]] = deque()
        self._delivering = threading.Lock()

    def now(self) -> float:
        return self._clock.now()

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        with self._lock:
            for guard in guards:
                if self._tables[guard.kind].revision(guard.key) != guard.revision:
                    return False
            self._apply(writes, events)
        self._deliver()
        return True

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        with self._lock:
            queue = self._queues.get(run_id)
            if not queue:
                return []
            rows = [self._rollouts.row(self._rollouts.positions[rollout_id,]) for rollout_id in islice(queue, limit)]
            locked = [(row, len(self._attempts_of.get(row.record.rollout_id))) for row in rows if row is not None]
            writes, events = decide(locked)
            self._apply(writes, events)
        self._deliver()
        return [row.record for row, _ in locked]

    async def select(self, query: Query[R]) -> Page[R]:
        table = cast("Table[R]", self._tables[query.kind])
        return table.select(query)

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        with self._lock:
            attempts = {(span.rollout_id, span.attempt_id) for span in spans}
            self._check_attempts(attempts)
            places: dict[str, list[Positions]] = {}
            result = [self._append(span, places) for span in spans]
            for key in attempts:
                attempt = self._attempts.get(key)
                if attempt is not None and attempt.status in LIVE_ATTEMPT:
                    self._attempts.update_in_place(key, attempt.model_copy(update={"last_heartbeat_time": now}))
        return result

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        with self._lock:
            self._check_attempts(set(attempts))
            result = []
            for key in attempts:
                self._last_sequence_ids[key] = self._last_sequence_ids.get(key, 0) + 1
                result.append(self._last_sequence_ids[key])
        return result

    async def count(self) -> dict[str, int]:
        with self._lock:
            return {
                "rollouts": len(self._rollouts),
                "attempts": len(self._attempts),
                "spans": len(self._spans),
                "resources": len(self._tables[ResourcesUpdate]),
                "workers": len(self._tables[Worker]),
            }

    async def find_open_runs(self) -> list[str]:
        live = (await self.select(Query(Attempt, (LIVE,)))).rows
        with self._lock:
            positions = [self._rollouts.positions.get((row.record.rollout_id,)) for row in live]
            rows = [self._rollouts.row(position) for position in positions if position is not None]
            return list(dict.fromkeys([*self._queues, *(row.record.run_id for row in rows if row is not None)]))

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self._watchers.add(listener)

    async def close(self) -> None:
        """Does nothing: the records live as long as this object."""

    def _apply(self, writes: Sequence[Write], events: Sequence[Event]) -> None:
        for write in writes:
            if isinstance(write, Put):
                self._put(write.record)
            else:
                self._delete(write)
        if events and self._watchers.listeners:
            self._undelivered.append(events)

    def _put(self, record: Record) -> None:
        table, key = self._tables[type(record)], key_of(record)
        before = table.get(key)
        if before is None:
            table.insert(key, record, table.places(record))
        else:
            table.replace(key, record)
        if type(record) is Rollout:
            was_queued = before is not None and before.status in _QUEUED
            if record.status in _QUEUED:
                if not was_queued:
                    self._queues.setdefault(record.run_id, _Queue()).add(record)
            elif was_queued:
                self._leave_queue(record)

    def _delete(self, write: Delete) -> None:
        if write.kind is Rollout:
            (rollout_id,) = write.key
            rollout = self._rollouts.get(write.key)
            if rollout is not None:
                self._leave_queue(rollout)
            for span in self._spans.found(self._spans_of.get(rollout_id)):
                self._spans.remove(key_of(span))
            for attempt in self._attempts.found(self._attempts_of.get(rollout_id)):
                self._last_sequence_ids.pop(key_of(attempt), None)
                self._attempts.remove(key_of(attempt))
        self._tables[write.kind].remove(write.key)

    def _leave_queue(self, rollout: Rollout) -> None:
        queue = self._queues.get(rollout.run_id)
        if queue is not None:
            queue.remove(rollout)
            if not queue:
                del self._queues[rollout.run_id]

    def _append(self, span: Span, places: dict[str, list[Positions]]) -> Span | None:
        """Stores a span unless it exists; ``places`` caches the index entry of each rollout in a batch."""
        key = (span.rollout_id, span.attempt_id, span.span_id)
        if key in self._spans.positions:
            return None
        attempt = key[:2]
        last = self._last_sequence_ids.get(attempt, 0)
        if span.sequence_id == 0:
            last += 1
            span = Span.from_valid({**span.__dict__, "sequence_id": last})
        elif span.sequence_id > last:
            last = span.sequence_id
        self._last_sequence_ids[attempt] = last
        if span.rollout_id not in places:
            places[span.rollout_id] = self._spans.places(span)
        self._spans.insert(key, span, places[span.rollout_id])
        return span

    def _check_attempts(self, attempts: set[tuple[str, str]]) -> None:
        for key in attempts:
            if key not in self._attempts.positions:
                if (key[0],) not in self._rollouts.positions:
                    raise NotFoundError(f"no rollout {key[0]!r} in this store")
                raise NotFoundError(f"rollout {key[0]!r} has no attempt {key[1]!r}")

    def _run_of(self, span: Span) -> str | None:
        rollout = self._rollouts.get((span.rollout_id,))
        return None if rollout is None else rollout.run_id

    def _deliver(self) -> None:
        """Calls the listeners in commit order and outside the lock.

        One thread delivers at a time. Other threads leave their events in the queue, which that thread checks once more
        after it has released the lock.
        """
        while self._undelivered and self._delivering.acquire(blocking=False):
            try:
                while self._undelivered:
                    self._watchers.publish(self._undelivered.popleft())
            finally:
                self._delivering.release()


class InMemoryLightningStore(BackendStore):
    """A store in the memory of this process; it wakes waiters in all threads and event loops."""

    def __init__(self, *, lease_s: float = 60.0, watchdog_interval_s: float | None = 1.0) -> None:
        """Makes an empty store.

        Args:
            lease_s: an attempt is lost after this time without a span or a heartbeat.
            watchdog_interval_s: how late an overdue attempt may be ended; None: it is not ended.
        """
        super().__init__(MemoryBackend(), lease_s=lease_s, watchdog_interval_s=watchdog_interval_s)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a memory store cannot be sent to another process; serve it with LightningStoreServer and give the other "
            "process a LightningStoreClient"
        )

    @classmethod
    def from_url(cls, url: str, *, run_id: str = DEFAULT_RUN_ID, token: str | None = None) -> Self:
        """Makes a new, empty store at each call.

        Raises:
            ConfigError: the URL has more than ``memory://``, or a token is given.
        """
        if url.partition("://")[2]:
            raise ConfigError(f"store {hide_password(url)!r}: a memory store has no name or path; write memory://")
        if token is not None:
            raise ConfigError("memory:// takes no token: other processes cannot reach it")
        return cls().with_run(run_id)
