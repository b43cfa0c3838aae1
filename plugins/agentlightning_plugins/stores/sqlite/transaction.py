# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""One transaction of the writer: rows are read when they are needed, changed in memory, and written."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import orjson

from agentlightning.store.backend import KEYS, Delete, Row
from agentlightning.types import Attempt, Record, Rollout, Span
from agentlightning_plugins.stores.shared.sql import batch
from agentlightning_plugins.stores.shared.sql.changes import (
    LAST_IN_QUEUE,
    PARENTS,
    Append,
    Changes,
    Claiming,
    RowKey,
    Stored,
    Work,
    columns_of,
)
from agentlightning_plugins.stores.shared.sql.condition import COLUMNS, TABLES
from agentlightning_plugins.stores.shared.sql.document import decode, encode_events
from agentlightning_plugins.stores.shared.sql.parts import SharedParts, deflate, join, unwritten

_STATE: Final[dict[type[Record], tuple[str, ...]]] = {
    Rollout: ("position", "revision", "run_id", "status", "queue_position"),
    Attempt: ("position", "revision", "live", "last_span", "last_heartbeat_time"),
}
"""The columns that are read before a row is changed; the first two for other kinds."""
_NEXT_IN_QUEUE: Final = (
    "SELECT max(queue_position) FROM rollout WHERE run_id = ? AND priority = ? AND queue_position IS NOT NULL"
)
_OLDEST: Final = (
    "SELECT record, revision, (SELECT count(*) FROM attempt WHERE attempt.rollout = rollout.position) FROM rollout "
    "WHERE run_id = ? AND queue_position IS NOT NULL ORDER BY priority DESC, queue_position LIMIT ?"
)
_KNOWN_SPANS: Final = (
    "SELECT span_id, position, revision FROM span WHERE attempt = ? AND span_id IN (SELECT value FROM json_each(?))"
)
_APPEND: Final = "UPDATE attempt SET last_span = ?, last_heartbeat_time = ? WHERE position = ?"
_COUNT: Final = "INSERT INTO tally VALUES {} ON CONFLICT DO UPDATE SET number = number + excluded.number"
_TELL: Final = "INSERT INTO event (origin, events) VALUES (?, ?)"
_OF_ROLLOUT: Final = "attempt IN (SELECT position FROM attempt WHERE rollout = ?)"
_PART: Final = "INSERT INTO part (attempt, content) VALUES (?, ?)"
_MAX_ROWS: Final = 32
"""Maximum number of rows that one statement inserts. Each SQLite call releases the GIL and has to reacquire it."""
_MAX_KNOWN: Final = 20_000


def _insert(kind: type[Record]) -> str:
    return f"INSERT INTO {TABLES[kind]} ({', '.join(COLUMNS[kind])}, revision, record) VALUES {{}}"


def _update(kind: type[Record]) -> str:
    values = "".join(f"{column} = ?, " for column in list(COLUMNS[kind])[2:])
    return f"UPDATE {TABLES[kind]} SET {values}revision = ?, record = ? WHERE position = ?"


def _find(kind: type[Record]) -> str:
    names = (TABLES[PARENTS[kind]], KEYS[kind][-1]) if kind in PARENTS else KEYS[kind]
    where = " AND ".join(f"{name} = ?" for name in names)
    return f"SELECT {', '.join(_STATE.get(kind, ('position', 'revision')))} FROM {TABLES[kind]} WHERE {where}"


_INSERT: Final = {kind: _insert(kind) for kind in COLUMNS}
_UPDATE: Final = {kind: _update(kind) for kind in COLUMNS}
_FIND: Final = {kind: _find(kind) for kind in COLUMNS}


class Rows(dict[RowKey, Stored | None]):
    """The rows that the writer knows, valid until another process writes. Other rows are read from the file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self.parts = SharedParts()
        self._queue_ends: dict[tuple[str, int], int] = {}
        """The last position in the queue of each run and priority."""

    def __missing__(self, key: RowKey) -> Stored | None:
        kind, names = key
        parent, values = None, list[Any](names)
        if kind in PARENTS:
            parent = self[PARENTS[kind], names[: len(KEYS[PARENTS[kind]])]]
            values = [None if parent is None else parent.position, names[-1]]
        row = None
        if found := self._execute(_FIND[kind], values).fetchone():
            row = Stored(key, position=found[0], revision=found[1], parent=parent)
            if kind is Rollout:
                row.run_id, row.status, row.queue_position = found[2:]
            elif parent is not None:
                row.run_id = parent.run_id
            if kind is Attempt:
                row.live, row.last_span, row.heartbeat = found[2:]
        self[key] = row
        return row

    def forget(self) -> None:
        self.clear()
        self._queue_ends.clear()

    def next_in_queue(self, run_id: str, priority: int) -> int:
        queue = run_id, priority
        end = self._queue_ends.get(queue)
        if end is None:
            end = self._execute(_NEXT_IN_QUEUE, queue).fetchone()[0] or 0
        self._queue_ends[queue] = end + 1
        return end + 1


class Transaction:
    """One transaction of several callers."""

    def __init__(self, connection: sqlite3.Connection, rows: Rows) -> None:
        self._execute = connection.execute
        self._rows = rows
        self.changes = Changes(rows)

    def apply(self, work: Work) -> Any:
        """Does one caller's work and returns the result; the rows are written by ``finish``, or before a claim."""
        if isinstance(work, Claiming):
            return self._claim(work)
        if isinstance(work, Append):
            self._read_spans(work)
        elif any(isinstance(write, Delete) for write in getattr(work, "writes", ())):
            self._write()
            self._rows.forget()  # otherwise every known row would be searched for the attempts and spans
        return work.apply(self.changes)

    def finish(self, origin: int) -> int | None:
        """Writes everything, with the events for other processes, before the commit.

        Returns:
            The position of the events, if there are any.
        """
        self._write()
        self._insert(_COUNT, [(*key, change) for key, change in self.changes.counts.items() if change])
        if len(self._rows) > _MAX_KNOWN:
            self._rows.forget()
        if not self.changes.events:
            return None
        position = self._execute(_TELL, (origin, encode_events(self.changes.events))).lastrowid
        assert position is not None
        if position % batch.PRUNE_EVERY == 0:
            self._execute("DELETE FROM event WHERE position <= ?", (position - batch.KEPT_EVENTS,))
        return position

    def _claim(self, work: Claiming) -> Sequence[Rollout]:
        self._write()  # what others put into the queue in this transaction
        locked = [
            (Row(decode(Rollout, text), revision), attempts)
            for text, revision, attempts in self._execute(_OLDEST, (work.run_id, work.limit))
        ]
        if locked:
            work.make_commit(locked).apply(self.changes)
        return [row.record for row, _ in locked]

    def _read_spans(self, work: Append) -> None:
        """Reads at once which of the spans are stored already."""
        ids: dict[Stored, list[RowKey]] = {}
        for key, _ in work.spans:
            if key not in self._rows:
                attempt = self._rows[Attempt, key[1][:2]]
                self._rows[key] = None
                if attempt is not None and attempt.last_span and attempt.position:  # every span has a number above 0
                    ids.setdefault(attempt, []).append(key)
        for attempt, keys in ids.items():
            wanted = {key[1][2]: key for key in keys}
            names = orjson.dumps(list(wanted)).decode()
            for span_id, position, revision in self._execute(_KNOWN_SPANS, (attempt.position, names)).fetchall():
                key = wanted[span_id]
                self._rows[key] = Stored(key, position, revision, attempt.run_id, parent=attempt)

    def _write(self) -> None:
        changes = self.changes
        self._delete(changes.deleted)
        by_kind: dict[type[Record], list[Stored]] = {}
        for row in changes.written:
            by_kind.setdefault(row.key[0], []).append(row)
        for kind in filter(by_kind.__contains__, COLUMNS):
            if kind is Span:
                self._write_spans(by_kind[kind])
                continue
            for row in by_kind[kind]:
                if row.record is None:
                    self._execute(_APPEND, (row.last_span, row.heartbeat, row.position))
                else:
                    self._put(kind, row)
        changes.written.clear()
        changes.deleted.clear()

    def _put(self, kind: type[Record], row: Stored) -> None:
        if row.queue_position == LAST_IN_QUEUE:
            assert isinstance(row.record, Rollout)
            row.queue_position = self._rows.next_in_queue(row.run_id, row.record.priority)
        values = _values(row)
        if row.position is None:
            marks = f"({', '.join('?' * len(values))})"
            row.position = self._execute(_INSERT[kind].format(marks), values).lastrowid
        else:
            self._execute(_UPDATE[kind], (*values[min(2, len(COLUMNS[kind])) :], row.position))
        row.record, row.text = None, ""

    def _write_spans(self, rows: Sequence[Stored]) -> None:
        for row in rows:
            if row.position is None:
                self._share(row)
            else:
                self._execute(_UPDATE[Span], (*_values(row)[2:], row.position))
            del self._rows[row.key]  # spans are rarely written again
        self._insert(_INSERT[Span], [_values(row) for row in rows if row.position is None])

    def _share(self, row: Stored) -> None:
        """Stores the parts of a new span that are not stored yet, and makes its row refer to all of them."""
        if not (pieces := self._rows.parts.split(row)):
            return
        assert row.parent is not None
        for part in unwritten(pieces):
            part.position = self._execute(_PART, (row.parent.position, deflate(part.text))).lastrowid
            part.text = ""
        row.text = deflate(join(pieces))

    def _insert(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        for start in range(0, len(rows), _MAX_ROWS):
            part = rows[start : start + _MAX_ROWS]
            marks = f"({', '.join('?' * len(part[0]))})"
            self._execute(statement.format(", ".join([marks] * len(part))), [*chain.from_iterable(part)])

    def _delete(self, rows: Sequence[Stored]) -> None:
        """Deletes rows with their attempts and spans, and counts these."""
        counts = self.changes.counts
        for row in rows:
            kind = row.key[0]
            self._execute(f"DELETE FROM {TABLES[kind]} WHERE position = ?", (row.position,))
            if kind is Rollout:
                spans = self._execute(f"DELETE FROM span WHERE {_OF_ROLLOUT}", (row.position,)).rowcount
                counts["spans", row.run_id, ""] -= spans
                self._execute(f"DELETE FROM part WHERE {_OF_ROLLOUT}", (row.position,))
                attempts = self._execute("DELETE FROM attempt WHERE rollout = ?", (row.position,)).rowcount
                counts["attempts", row.run_id, ""] -= attempts
            elif kind is Attempt:
                spans = self._execute("DELETE FROM span WHERE attempt = ?", (row.position,)).rowcount
                counts["spans", row.run_id, ""] -= spans
                self._execute("DELETE FROM part WHERE attempt = ?", (row.position,))


def _values(row: Stored) -> list[Any]:
    # A metadata value as its column stores it; others are found by their JSON.
    columns = columns_of(row, lambda value: value if isinstance(value, (str, int, float)) else None)
    return [*[columns[name] for name in COLUMNS[row.key[0]]], row.revision, row.text]
