"""The changes of one transaction, made in memory between reading and writing the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from agentlightning.errors import NotFoundError
from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import KEYS, Claim, Delete, Guard, Key, Put, Row, Write, key_of
from agentlightning.types import LIVE_ATTEMPT, Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.shared.sql.document import encode

RowKey: TypeAlias = tuple[type[Record], Key]

PARENTS: Final[dict[type[Record], type[Record]]] = {Attempt: Rollout, Span: Attempt}
NAMES: Final[dict[type[Record], str]] = {
    Run: "runs",
    Rollout: "rollouts",
    Attempt: "attempts",
    Span: "spans",
    ResourcesUpdate: "resources",
    Worker: "workers",
    Metrics: "metrics",
}
"""The names under which records are counted."""
_QUEUED: Final = frozenset({"queuing", "requeuing"})
LAST_IN_QUEUE: Final = 0
"""The ``queue_position`` of a rollout that enters the queue when it is written."""


@dataclass(slots=True, eq=False)
class Stored:
    """The row of a record after the changes so far."""

    key: RowKey
    position: int | None = None
    """None until the row is inserted."""
    revision: int = 0
    run_id: str = ""
    """The run of the rollout, for a rollout, attempt or span."""
    status: str = ""
    queue_position: int | None = None
    live: bool = False
    last_span: int = 0
    """The greatest number of an attempt's spans; for a span, its own number."""
    heartbeat: float | None = None
    parent: Stored | None = None
    """The rollout of an attempt, the attempt of a span."""
    record: Record | None = None
    """The record to write; None if it was not put."""
    text: str | bytes = ""
    """``record`` as JSON, or as the database stores it."""


class Document(NamedTuple):
    """A record to put, with its JSON, which the caller's thread has encoded."""

    record: Record
    text: str


class Changes:
    """Applies the work of several callers in turn; only the last version of a row is written."""

    def __init__(self, rows: dict[RowKey, Stored | None]) -> None:
        """Begins without changes.

        Args:
            rows: every row that the work needs; None for a record that is not stored. It is updated.
        """
        self._rows = rows
        self.written: dict[Stored, None] = {}
        """The rows to insert or update, in the order in which they were first changed."""
        self.deleted: list[Stored] = []
        """The rows to delete, with their attempts and spans, which are not in ``counts``."""
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """How the number of records changes, by name, run (rollouts, attempts and spans) and status (rollouts)."""
        self.events: list[Event] = []
        self.steps = 0
        """Grows with each change."""

    def commit(self, writes: Iterable[Document | Delete], guards: Iterable[Guard], events: Iterable[Event]) -> bool:
        for guard in guards:
            row = self._rows[guard.kind, guard.key]
            if (0 if row is None else row.revision) != guard.revision:
                return False
        for write in writes:
            if isinstance(write, Delete):
                self._delete((write.kind, write.key))
            else:
                self._put(write)
        self.events += events
        return True

    def append(self, spans: Sequence[tuple[RowKey, Document]], now: float) -> list[Span | None]:
        attempts = {key[1][:2]: self._parent(Span, key[1]) for key, _ in spans}  # all or none
        stored: list[Span | None] = []
        for key, (span, text) in spans:
            assert isinstance(span, Span)
            if self._rows[key] is not None:
                stored.append(None)
                continue
            attempt = attempts[key[1][:2]]
            number = self._number(attempt, span.sequence_id)
            row = Stored(key, None, 1, attempt.run_id, last_span=number, parent=attempt, record=span, text=text)
            self._rows[key] = row
            self.written[row] = None
            self.counts["spans", attempt.run_id, ""] += 1
            stored.append(span if span.sequence_id else span.model_copy(update={"sequence_id": number}))
        for attempt in attempts.values():
            if attempt.live:
                attempt.heartbeat = now
            self._change(attempt)
        return stored

    def next_sequence_ids(self, attempts: Iterable[tuple[str, str]]) -> list[int]:
        found = [self._parent(Span, key) for key in attempts]
        return [self._number(attempt, 0) for attempt in found]

    def _put(self, document: Document) -> Stored:
        record, text = document
        kind, key = row_key = type(record), key_of(record)
        parent = self._parent(kind, key) if kind in PARENTS else None
        row = self._rows[row_key]
        status = record.status if isinstance(record, Rollout) else ""
        if row is None:
            run_id = parent.run_id if parent is not None else record.run_id if isinstance(record, Rollout) else ""
            row = self._rows[row_key] = Stored(row_key, run_id=run_id, parent=parent)
            self.counts[NAMES[kind], run_id, status] += 1
        elif row.status != status:
            self.counts[NAMES[kind], row.run_id, row.status] -= 1
            self.counts[NAMES[kind], row.run_id, status] += 1
        if isinstance(record, Attempt):
            row.live, row.heartbeat = record.status in LIVE_ATTEMPT, record.last_heartbeat_time
        elif isinstance(record, Span):
            assert parent is not None
            row.last_span = self._number(parent, record.sequence_id)
        elif status not in _QUEUED:
            row.queue_position = None
        elif row.queue_position is None:
            row.queue_position = LAST_IN_QUEUE
        row.status, row.record, row.text, row.revision = status, record, text, row.revision + 1
        self._change(row)
        return row

    def _delete(self, key: RowKey) -> None:
        row = self._rows[key]
        if row is None:
            return
        self._forget(row)
        self.counts[NAMES[key[0]], row.run_id, row.status] -= 1
        if row.position is not None:
            self.deleted.append(row)
        if key[0] in PARENTS.values():
            self._forget_children(row)
        self.steps += 1

    def _forget_children(self, parent: Stored) -> None:
        for row in [row for row in self._rows.values() if row is not None and row.parent is parent]:
            self._forget(row)
            if row.position is None:  # stored rows are counted when they are deleted
                self.counts[NAMES[row.key[0]], row.run_id, row.status] -= 1
            self._forget_children(row)

    def _forget(self, row: Stored) -> None:
        self._rows[row.key] = None
        self.written.pop(row, None)

    def _parent(self, kind: type[Record], key: Key) -> Stored:
        """Returns the rollout of an attempt, or the attempt of a span.

        Raises:
            NotFoundError: it is not stored.
        """
        parent = self._rows[PARENTS[kind], key[: len(KEYS[PARENTS[kind]])]]
        if parent is None:
            attempt = f" has no attempt {key[1]!r}" if kind is Span else ""
            raise NotFoundError(f"rollout {key[0]!r}{attempt or ' is not in this store'}")
        return parent

    def _number(self, attempt: Stored, number: int) -> int:
        """Returns the number of a span, the next one for 0, and advances the counter of its attempt."""
        number = number or attempt.last_span + 1
        attempt.last_span = max(attempt.last_span, number)
        self._change(attempt)
        return number

    def _change(self, row: Stored) -> None:
        self.written[row] = None
        self.steps += 1


@dataclass(slots=True, eq=False)
class Commit:
    """A caller's writes, done if all guards hold."""

    writes: Sequence[Document | Delete]
    guards: Sequence[Guard]
    events: Sequence[Event]

    @classmethod
    def encoded(cls, writes: Sequence[Write], guards: Sequence[Guard], events: Sequence[Event]) -> Commit:
        documents = [
            Document(write.record, encode(write.record)) if isinstance(write, Put) else write for write in writes
        ]
        return cls(documents, guards, events)

    @property
    def size(self) -> int:
        """Number of characters of JSON."""
        return sum(len(write.text) for write in self.writes if isinstance(write, Document))

    def keys(self) -> Iterator[RowKey]:
        """Yields the keys of all rows that ``apply`` needs."""
        for guard in self.guards:
            yield from _with_parents(guard.kind, guard.key)
        for write in self.writes:
            if isinstance(write, Delete):
                yield from _with_parents(write.kind, write.key)
            else:
                yield from _with_parents(type(write.record), key_of(write.record))

    def apply(self, changes: Changes) -> bool:
        return changes.commit(self.writes, self.guards, self.events)


@dataclass(slots=True, eq=False)
class Append:
    """A caller's spans."""

    spans: Sequence[tuple[RowKey, Document]]
    now: float

    @classmethod
    def encoded(cls, spans: Iterable[Span], now: float) -> Append:
        return cls([((Span, key_of(span)), Document(span, encode(span))) for span in spans], now)

    @property
    def size(self) -> int:
        return sum(len(document.text) for _, document in self.spans)

    def keys(self) -> Iterator[RowKey]:
        for key, _ in self.spans:
            yield Attempt, key[1][:2]
            yield key

    def apply(self, changes: Changes) -> list[Span | None]:
        return changes.append(self.spans, self.now)


@dataclass(slots=True, eq=False)
class TakeNumbers:
    """A caller's request for the next span number of each attempt."""

    attempts: Sequence[tuple[str, str]]
    size = 0

    def keys(self) -> Iterator[RowKey]:
        return ((Attempt, key) for key in self.attempts)

    def apply(self, changes: Changes) -> list[int]:
        return changes.next_sequence_ids(self.attempts)


@dataclass(slots=True, eq=False)
class Claiming:
    """A caller's claim: it becomes a commit when rollouts are locked."""

    run_id: str
    limit: int
    decide: Claim
    size = 0

    def make_commit(self, locked: Sequence[tuple[Row[Rollout], int]]) -> Commit:
        writes, events = self.decide(locked)
        return Commit.encoded(writes, (), events)


Work: TypeAlias = Commit | Append | TakeNumbers | Claiming


def _with_parents(kind: type[Record], key: Key) -> Iterator[RowKey]:
    yield kind, key
    while kind in PARENTS:
        kind = PARENTS[kind]
        key = key[: len(KEYS[kind])]
        yield kind, key


def columns_of(row: Stored, index_key: Callable[[object], object]) -> dict[str, Any]:
    """Returns the columns of a row to write, apart from revision and JSON.

    Args:
        row: the row, whose parent has been inserted.
        index_key: maps a metadata value to its column.
    """
    record = row.record
    parent = None if row.parent is None else row.parent.position
    if isinstance(record, Span):
        columns = {name: getattr(record, name) for name in ("span_id", "start_time", "name", "trace_id", "parent_id")}
        return columns | {"attempt": parent, "sequence_id": row.last_span, "run_id": row.run_id}
    columns = dict(record.__dict__)
    match record:
        case Rollout():
            metadata = record.metadata or {}
            for column, name in (("task_id", "task_id"), ("group_id", "group"), ("step", "step")):
                columns[column] = index_key(metadata.get(name))
            columns["queue_position"] = row.queue_position
        case Attempt():
            columns |= {"rollout": parent, "live": row.live, "last_heartbeat_time": row.heartbeat}
            columns["last_span"] = row.last_span
    return columns
