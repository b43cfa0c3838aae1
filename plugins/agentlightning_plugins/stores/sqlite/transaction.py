# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""One transaction of the writer: guards, records, claims, spans and counts."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import orjson

from agentlightning.errors import NotFoundError
from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.store.backend import Claim, Delete, Guard, Key, Put, Row, Write, key_of
from agentlightning.types import LIVE_ATTEMPT, Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning_plugins.stores.sql.condition import TABLES
from agentlightning_plugins.stores.sql.document import decode, encode, encode_events
from agentlightning_plugins.stores.sqlite.statement import COLUMNS, FIND, FIXED, INSERT, UPDATE

_QUEUED: Final = frozenset({"queuing", "requeuing"})
_PLURALS: Final[dict[type[Record], str]] = {
    Run: "runs",
    Attempt: "attempts",
    Span: "spans",
    ResourcesUpdate: "resources",
    Worker: "workers",
    Metrics: "metrics",
}
_NEXT_IN_QUEUE: Final = "SELECT max(queue_position) FROM rollout WHERE run_id = ? AND queue_position IS NOT NULL"
_OLDEST: Final = (
    "SELECT position, revision, status, queue_position, record, "
    "(SELECT count(*) FROM attempt WHERE attempt.rollout = rollout.position) FROM rollout "
    "WHERE run_id = ? AND queue_position IS NOT NULL ORDER BY queue_position LIMIT ?"
)
_KNOWN_SPANS: Final = (
    "SELECT attempt, span_id FROM span WHERE attempt = ? AND span_id IN (SELECT value FROM json_each(?))"
)
_ADD_SPANS: Final = "INSERT INTO span (attempt, span_id, sequence_id, run_id, start_time, revision, record) VALUES {}"
_BEAT: Final = "UPDATE attempt SET last_span = ?, last_heartbeat_time = ? WHERE position = ?"
_NUMBER: Final = "UPDATE attempt SET last_span = ? WHERE position = ?"
_COUNT: Final = "INSERT INTO tally VALUES {} ON CONFLICT DO UPDATE SET number = number + excluded.number"
_MAX_ROWS: Final = 32
"""Maximum number of rows that one statement inserts. Each SQLite call releases the GIL and has to reacquire it."""
_TELL: Final = "INSERT INTO event (origin, events) VALUES (?, ?)"
_DELETE_SPANS_OF_ROLLOUT: Final = "DELETE FROM span WHERE attempt IN (SELECT position FROM attempt WHERE rollout = ?)"
_MAX_KNOWN: Final = 20_000
_PRUNED_EVERY: Final = 64
KEPT_EVENTS: Final = 100_000
"""The events of this many transactions are kept for other processes. A process further behind reads the records."""


class Document(NamedTuple):
    """A record to put, with its JSON, which the caller's thread has encoded."""

    record: Record
    text: str


def encode_writes(writes: Iterable[Write]) -> list[Document | Delete]:
    return [Document(write.record, encode(write.record)) if isinstance(write, Put) else write for write in writes]


class State(NamedTuple):
    """The row id of a record, and the columns that its next version depends on."""

    position: int
    revision: int
    run_id: str = ""
    status: str = ""
    queue_position: int | None = None
    live: int | None = None
    last_span: int = 0


class Known:
    """The writer's cache of states, valid until another process writes."""

    def __init__(self) -> None:
        self.states: dict[tuple[type[Record], Key], State | None] = {}
        self.queue_ends: dict[str, int] = {}
        """The last position in the queue of each run."""

    def forget(self) -> None:
        self.states.clear()
        self.queue_ends.clear()

    def shrink(self) -> None:
        """Bounds the memory; called between transactions."""
        if len(self.states) > _MAX_KNOWN:
            self.states.clear()


class Transaction:
    """One transaction of several callers. Each method checks everything that can fail before it writes a row."""

    def __init__(self, connection: sqlite3.Connection, known: Known) -> None:
        self._execute = connection.execute
        self._states = known.states
        self._queue_ends = known.queue_ends
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._workers: dict[Key, Document] = {}
        """Puts that ``finish`` writes: most changes of a worker's rollouts put its record, but one write is enough."""
        self.events: list[Event] = []
        """The events to publish, in order."""

    def commit(self, writes: Sequence[Document | Delete], guards: Sequence[Guard], events: Sequence[Event]) -> bool:
        for guard in guards:
            if guard.kind is Worker:
                self._put_workers()
            state = self._state(guard.kind, guard.key)
            if (0 if state is None else state.revision) != guard.revision:
                return False
        workers: dict[Key, Document] = {}
        for write in writes:
            if not isinstance(write, Document):
                if write.kind is Worker:
                    self._put_workers()
                    workers.pop(write.key, None)
                self._delete(write)
            elif isinstance(write.record, Worker):
                workers[key_of(write.record)] = write
            else:
                self._put(write.record, write.text)
        self._workers |= workers  # after everything that can fail
        self.events += events
        return True

    def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        locked: list[tuple[Row[Rollout], int]] = []
        for position, revision, status, queue_position, text, attempts in self._execute(_OLDEST, (run_id, limit)):
            rollout = decode(Rollout, text)
            self._states[Rollout, (rollout.rollout_id,)] = State(position, revision, run_id, status, queue_position)
            locked.append((Row(rollout, revision), attempts))
        if not locked:
            return []
        writes, events = decide(locked)
        self.commit(encode_writes(writes), (), events)
        return [row.record for row, _ in locked]

    def append(self, spans: Sequence[tuple[Span, str]], now: float) -> Sequence[Span | None]:
        attempts = self._find_attempts({_attempt_of(span) for span, _ in spans})
        last = {key: attempt.last_span for key, (_, attempt) in attempts.items()}
        known = self._find_spans(spans, attempts)
        stored: list[Span | None] = []
        rows: list[Any] = []
        for span, text in spans:
            key = _attempt_of(span)
            rollout, attempt = attempts[key]
            if (attempt.position, span.span_id) in known:
                stored.append(None)
                continue
            known.add((attempt.position, span.span_id))
            number = span.sequence_id or last[key] + 1
            last[key] = max(last[key], number)
            rows.append((attempt.position, span.span_id, number, rollout.run_id, span.start_time, 1, text))
            self._counts["spans", rollout.run_id, ""] += 1
            stored.append(span if span.sequence_id else span.model_copy(update={"sequence_id": number}))
        self._insert_rows(_ADD_SPANS, rows)
        for key, (_, attempt) in attempts.items():
            if attempt.live:
                self._execute(_BEAT, (last[key], now, attempt.position))
            else:
                self._execute(_NUMBER, (last[key], attempt.position))
            self._states[Attempt, key] = attempt._replace(last_span=last[key])
        return stored

    def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        states = self._find_attempts(set(attempts))
        last = {key: attempt.last_span for key, (_, attempt) in states.items()}
        taken = []
        for key in attempts:
            last[key] += 1
            taken.append(last[key])
        for key, (_, attempt) in states.items():
            self._count_to(key, attempt, last[key])
        return taken

    def _count_to(self, key: tuple[str, str], attempt: State, number: int) -> None:
        """Sets the last span number of an attempt."""
        self._execute(_NUMBER, (number, attempt.position))
        self._states[Attempt, key] = attempt._replace(last_span=number)

    def finish(self, origin: int) -> int | None:
        """Writes the deferred workers, the counts and the events for other processes, before the commit.

        Returns:
            The position of the events, if there are any.
        """
        self._put_workers()
        self._insert_rows(_COUNT, [(*key, change) for key, change in self._counts.items() if change])
        if not self.events:
            return None
        position = self._execute(_TELL, (origin, encode_events(self.events))).lastrowid
        assert position is not None
        if position % _PRUNED_EVERY == 0:
            self._execute("DELETE FROM event WHERE position <= ?", (position - KEPT_EVENTS,))
        return position

    def _put_workers(self) -> None:
        for document in self._workers.values():
            self._put(document.record, document.text)
        self._workers.clear()

    def _insert_rows(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        for start in range(0, len(rows), _MAX_ROWS):
            part = rows[start : start + _MAX_ROWS]
            marks = f"({', '.join('?' * len(part[0]))})"
            self._execute(statement.format(", ".join([marks] * len(part))), [*chain.from_iterable(part)])

    def _find_spans(
        self, spans: Sequence[tuple[Span, str]], attempts: Mapping[tuple[str, str], tuple[State, State]]
    ) -> set[tuple[int, str]]:
        """Returns the spans that are already stored, by the positions of their attempts and their ids."""
        ids: dict[int, list[str]] = {}
        for span, _ in spans:
            attempt = attempts[_attempt_of(span)][1]
            if attempt.last_span:  # above 0: the attempt has spans, which all have numbers
                ids.setdefault(attempt.position, []).append(span.span_id)
        found: set[tuple[int, str]] = set()
        for position, span_ids in ids.items():
            found.update(self._execute(_KNOWN_SPANS, (position, orjson.dumps(span_ids).decode())))
        return found

    def _state(self, kind: type[Record], key: Key) -> State | None:
        """Returns the state of a record, from the cache or the file; None if it is not stored."""
        try:
            return self._states[kind, key]
        except KeyError:
            state = self._states[kind, key] = self._look_up(kind, key)
            return state

    def _look_up(self, kind: type[Record], key: Key) -> State | None:
        if kind is Attempt or kind is Span:
            parent = self._state(*_rollout_of(key)) if kind is Attempt else self._state(Attempt, key[:2])
            if parent is None:
                return None
            key = (parent.position, key[-1])
        row = self._execute(FIND[kind], key).fetchone()
        if row is None:
            return None
        if kind is Attempt:
            return State(row[0], row[1], live=row[2], last_span=row[3])
        return State(*row)

    def _find_attempts(self, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[State, State]]:
        """Returns the rollout and the attempt of each key.

        Raises:
            NotFoundError: one of them is not stored.
        """
        found = {}
        for key in keys:
            rollout = self._state(Rollout, key[:1])
            if rollout is None:
                raise NotFoundError(f"no rollout {key[0]!r} in this store")
            attempt = self._state(Attempt, key)
            if attempt is None:
                raise NotFoundError(f"rollout {key[0]!r} has no attempt {key[1]!r}")
            found[key] = rollout, attempt
        return found

    def _put(self, record: Record, text: str) -> None:
        kind, key = type(record), key_of(record)
        before = self._state(kind, key)
        columns, state, count = self._describe(record, before)
        if before is None:
            position = self._execute(INSERT[kind], (*columns, text)).lastrowid
            assert position is not None
            self._states[kind, key] = state._replace(position=position, revision=1)
            self._counts[count] += 1
        else:
            self._execute(UPDATE[kind], (*columns[FIXED[kind] :], text, before.position))
            self._states[kind, key] = state._replace(position=before.position, revision=before.revision + 1)
            if before.status != state.status:
                self._counts[count] += 1
                self._counts[count[0], count[1], before.status] -= 1

    def _describe(self, record: Record, before: State | None) -> tuple[tuple[Any, ...], State, tuple[str, str, str]]:
        """Returns the columns of a record, its state without position and revision, and the key of its count."""
        match record:
            case Rollout():
                queue_position = self._queue(record, before)
                metadata = record.metadata or {}
                indexed = [_indexed(metadata.get(name)) for name in ("task_id", "group", "step")]
                columns = (record.rollout_id, record.run_id, record.status, record.start_time, *indexed, queue_position)
                state = State(0, 0, record.run_id, record.status, queue_position)
                return columns, state, ("rollouts", record.run_id, record.status)
            case Attempt():
                rollout = self._state(Rollout, (record.rollout_id,))
                if rollout is None:
                    raise NotFoundError(f"no rollout {record.rollout_id!r} in this store")
                live = 1 if record.status in LIVE_ATTEMPT else None
                columns = (
                    rollout.position,
                    record.attempt_id,
                    record.sequence_id,
                    live,
                    record.worker_id,
                    record.last_heartbeat_time,
                )
                state = State(0, 0, live=live, last_span=0 if before is None else before.last_span)
                return columns, state, ("attempts", rollout.run_id, "")
            case Span():
                ((rollout, attempt),) = self._find_attempts([_attempt_of(record)]).values()
                if not attempt.last_span:  # a number above 0 marks an attempt with spans
                    self._count_to(_attempt_of(record), attempt, max(record.sequence_id, 1))
                columns = (attempt.position, record.span_id, record.sequence_id, rollout.run_id, record.start_time)
                return columns, State(0, 0), ("spans", rollout.run_id, "")
            case _:
                columns = tuple(getattr(record, column) for column in COLUMNS[type(record)])
                return columns, State(0, 0), (_PLURALS[type(record)], "", "")

    def _queue(self, rollout: Rollout, before: State | None) -> int | None:
        """Returns the position in the queue of a rollout that is put; None if it is not queued."""
        if rollout.status not in _QUEUED:
            return None
        if before is not None and before.queue_position is not None:
            return before.queue_position
        end = self._queue_ends.get(rollout.run_id)
        if end is None:
            end = self._execute(_NEXT_IN_QUEUE, (rollout.run_id,)).fetchone()[0] or 0
        self._queue_ends[rollout.run_id] = end + 1
        return end + 1

    def _delete(self, write: Delete) -> None:
        state = self._state(write.kind, write.key)
        if state is None:
            return
        self._execute(f"DELETE FROM {TABLES[write.kind]} WHERE position = ?", (state.position,))
        if write.kind is Rollout:
            spans = self._execute(_DELETE_SPANS_OF_ROLLOUT, (state.position,)).rowcount
            attempts = self._execute("DELETE FROM attempt WHERE rollout = ?", (state.position,)).rowcount
            self._counts["spans", state.run_id, ""] -= spans
            self._counts["attempts", state.run_id, ""] -= attempts
            self._counts["rollouts", state.run_id, state.status] -= 1
            self._states.clear()  # including the states of its attempts and spans
        elif write.kind is Attempt or write.kind is Span:
            rollout = self._state(*_rollout_of(write.key))
            run_id = "" if rollout is None else rollout.run_id
            self._counts[_PLURALS[write.kind], run_id, ""] -= 1
            if write.kind is Attempt:
                spans = self._execute("DELETE FROM span WHERE attempt = ?", (state.position,)).rowcount
                self._counts["spans", run_id, ""] -= spans
                self._states.clear()
        else:
            self._counts[_PLURALS[write.kind], "", ""] -= 1
        self._states[write.kind, write.key] = None


def _attempt_of(span: Span) -> tuple[str, str]:
    return span.rollout_id, span.attempt_id


def _rollout_of(key: Key) -> tuple[type[Rollout], Key]:
    """Returns the kind and key of the rollout of an attempt or span."""
    return Rollout, key[:1]


def _indexed(value: object) -> str | int | float | None:
    """Returns a metadata value as its column stores it; None for others, which are found by their JSON."""
    return value if isinstance(value, (str, int, float)) else None
