# ruff: noqa: S608 # statements are made of our own names; values are parameters
"""One transaction of the writer: rows are locked and read, changed in memory, and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import asyncpg

from agentlightning.errors import ConfigError
from agentlightning.store.backend import KEYS, Row
from agentlightning.types import Attempt, Record, Rollout, Span
from agentlightning_plugins.stores.shared.sql.batch import Item
from agentlightning_plugins.stores.shared.sql.changes import Changes, Claiming, RowKey, Stored, Work, columns_of
from agentlightning_plugins.stores.shared.sql.condition import COLUMNS, LONGEST_LABEL, TABLES, ColumnType
from agentlightning_plugins.stores.shared.sql.document import decode
from agentlightning_plugins.stores.shared.sql.parts import SharedParts, join, unwritten

_TYPES: Final[dict[ColumnType, str]] = {
    "text": "text",
    "label": "text",
    "key": "text",
    "integer": "bigint",
    "float": "float8",
    "boolean": "bool",
}
_REVISION: Final = {"position": "seen.position", "revision": "held.revision"}
_STATE: Final[dict[type[Record], dict[str, str]]] = {
    Rollout: {**_REVISION, "run_id": "seen.run_id", "status": "held.status", "queue_position": "held.queue_position"},
    Attempt: {
        **_REVISION,
        "run_id": "r.run_id",
        "live": "held.live",
        "last_span": "held.last_span",
        "heartbeat": "held.last_heartbeat_time",
    },
}
"""The expressions for the fields of ``Stored``; ``_REVISION`` for other kinds."""
_LOCKED: Final = "FOR UPDATE SKIP LOCKED"
CANDIDATES: Final = f"""
    SELECT r.position, r.revision, r.status, r.queue_position, r.record,
        (SELECT count(*) FROM agl.attempt a WHERE a.rollout = r.position) AS attempts
    FROM agl.rollout r JOIN LATERAL (
        SELECT FROM agl.rollout WHERE position = r.position AND revision = r.revision {_LOCKED}
    ) free ON true
    WHERE r.run_id = $1 AND r.queue_position IS NOT NULL ORDER BY r.priority DESC, r.queue_position LIMIT $2"""
"""The head of a queue, without rows that others have locked, or changed since the attempts were counted."""
_QUEUED: Final = """
    SELECT count(*) FROM (
        SELECT FROM agl.rollout WHERE run_id = $1 AND queue_position IS NOT NULL LIMIT $2
    ) AS queued"""
SPANS: Final = """
    SELECT n.number, s.position, s.revision
    FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS n (attempt, id, number)
    JOIN agl.span s ON s.attempt = n.attempt AND s.span_id = n.id"""
_APPEND: Final = """
    UPDATE agl.attempt t SET last_span = n.last_span, last_heartbeat_time = n.heartbeat
    FROM unnest($1::bigint[], $2::bigint[], $3::float8[]) AS n (position, last_span, heartbeat)
    WHERE t.position = n.position"""
_DELETE_CHILDREN: Final = """
    WITH gone AS (DELETE FROM agl.{} WHERE {} = ANY ($1) RETURNING position, {} AS run_id)
    SELECT position, run_id FROM gone"""
_PARTS: Final = """
    INSERT INTO agl.part (attempt, content) SELECT attempt, content
    FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS n (attempt, content, number) ORDER BY number
    RETURNING position"""
_COUNT: Final = """
    INSERT INTO agl.tally AS t (slot, name, run_id, status, number)
    SELECT $1, * FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[])
    ON CONFLICT (name, run_id, status, slot) DO UPDATE SET number = t.number + excluded.number"""


def _unnest(types: Mapping[str, ColumnType]) -> str:
    """Returns a table of rows that are passed as one array for each column, with their ``number`` from 1."""
    arrays = ", ".join(f"${number}::{_TYPES[kind]}[]" for number, kind in enumerate(types.values(), 1))
    return f"unnest({arrays}) WITH ORDINALITY AS n ({', '.join(types)}, number)"


def _lock(kind: type[Record]) -> str:
    """Returns a statement that locks rows by their keys; a row that another transaction has locked has no revision."""
    table, key = f"agl.{TABLES[kind]}", {name: COLUMNS[kind].get(name, "text") for name in KEYS[kind]}
    if kind is Attempt:
        seen = "agl.rollout r USING (rollout_id) JOIN agl.attempt seen ON seen.rollout = r.position "
        seen += "AND seen.attempt_id = n.attempt_id"
    else:
        seen = f"{table} seen USING ({', '.join(key)})"
    return (
        f"SELECT n.number, {', '.join(_STATE.get(kind, _REVISION).values())} FROM {_unnest(key)} JOIN {seen} "
        f"LEFT JOIN LATERAL (SELECT * FROM {table} t WHERE t.position = seen.position {_LOCKED}) held ON true"
    )


def _value(column: str) -> str:
    if column == "queue_position":
        return "CASE n.queue_position WHEN 0 THEN nextval('agl.queue') ELSE n.queue_position END"
    return f"n.{column}"


def _insert(kind: type[Record]) -> str:
    columns = {**COLUMNS[kind], "revision": "integer", "record": "text"}
    values = {column: _value(column) for column in columns}
    if kind is Span:
        values["xid"] = "(SELECT pg_current_xact_id()::text::bigint + xid_offset FROM agl.schema_version)"
    return (
        f"INSERT INTO agl.{TABLES[kind]} ({', '.join(values)}) SELECT {', '.join(values.values())} "
        f"FROM {_unnest(columns)} ORDER BY number RETURNING position"
    )


def _update(kind: type[Record]) -> str:
    columns = {**COLUMNS[kind], "revision": "integer", "record": "text"}
    values = ", ".join(f"{column} = {_value(column)}" for column in columns)
    source = _unnest({**columns, "position": "integer"})
    return f"UPDATE agl.{TABLES[kind]} t SET {values} FROM {source} WHERE t.position = n.position"


LOCK: Final = {kind: _lock(kind) for kind in KEYS if kind is not Span}
INSERT: Final = {kind: _insert(kind) for kind in COLUMNS}
UPDATE: Final = {kind: _update(kind) for kind in COLUMNS}


class Transaction:
    """The work of several callers. Rows that another transaction has locked are not waited for."""

    def __init__(self, connection: asyncpg.Connection, slot: int, parts: SharedParts) -> None:
        """Makes a transaction.

        Args:
            connection: a connection on which a transaction has begun.
            slot: the number under which this process counts records.
            parts: the parts of spans that this process has stored.
        """
        self._connection = connection
        self._slot = slot
        self._parts = parts
        self._rows: dict[RowKey, Stored | None] = {}
        self._busy: set[RowKey] = set()
        self._busy_claims: list[Item[Work]] = []
        """The claims that found only rollouts that other transactions have locked."""
        self.changes = Changes(self._rows)

    async def apply(self, items: Sequence[Item[Work]]) -> list[Item[Work]]:
        """Does the work, apart from the writing; returns the items whose rows another transaction has locked.

        Raises:
            Exception: an item failed after a part of it was done; the transaction cannot be used.
        """
        works = await self._claim(items)
        needed = {key for work in works.values() for key in work.keys()}  # noqa: SIM118 # not a mapping
        await self._lock(needed - self._rows.keys())
        busy = self._busy_claims
        for item, work in works.items():
            if not self._busy.isdisjoint(work.keys()):
                busy.append(item)
                continue
            steps = self.changes.steps
            try:
                result = work.apply(self.changes)
                if not isinstance(item.work, Claiming):
                    item.result = result
            except Exception as error:  # isolation point: one caller's failure must not fail another call
                if self.changes.steps != steps:
                    raise
                item.error = error
        return busy

    async def write(self) -> None:
        """Writes the changed rows."""
        changes = self.changes
        if changes.deleted:
            await self._delete()
        for kind, columns in COLUMNS.items():
            rows = [row for row in changes.written if row.key[0] is kind and row.record is not None]
            new = [row for row in rows if row.position is None]
            old = [row for row in rows if row.position is not None]
            if old:
                await self._connection.execute(UPDATE[kind], *_arrays(old, columns), [row.position for row in old])
            if new and kind is Span:
                await self._share(new)
            if new:
                found = await self._connection.fetch(INSERT[kind], *_arrays(new, columns))
                for row, (position,) in zip(new, found, strict=True):
                    row.position = position
        appended = [row for row in changes.written if row.record is None]
        if appended:
            values = zip(*((row.position, row.last_span, row.heartbeat) for row in appended), strict=True)
            await self._connection.execute(_APPEND, *map(list, values))
        counts = [(*key, number) for key, number in changes.counts.items() if number]
        if counts:
            await self._connection.execute(_COUNT, self._slot, *map(list, zip(*counts, strict=True)))

    async def _share(self, rows: Sequence[Stored]) -> None:
        """Stores the parts of new spans that are not stored yet, and makes the rows refer to all of them."""
        split = [(row, pieces) for row in rows if (pieces := self._parts.split(row))]
        new = {part: row.parent.position for row, pieces in split if row.parent for part in unwritten(pieces)}
        found = await self._connection.fetch(_PARTS, [*new.values()], [part.text for part in new]) if new else ()
        for part, (position,) in zip(new, found, strict=True):
            part.position, part.text = position, ""
        for row, pieces in split:
            row.text = join(pieces)

    async def _claim(self, items: Sequence[Item[Work]]) -> dict[Item[Work], Any]:
        """Locks the heads of queues and turns claims into commits; claims that find nothing are done."""
        works: dict[Item[Work], Any] = {}
        queues: dict[str, list[Item[Work]]] = {}
        for item in items:
            item.result = item.error = None
            if isinstance(item.work, Claiming):
                queues.setdefault(item.work.run_id, []).append(item)
        for run_id, claims in queues.items():
            limit = sum(item.work.limit for item in claims if isinstance(item.work, Claiming))
            found = await self._connection.fetch(CANDIDATES, run_id, limit)
            number, are_busy = len(found), False
            if number < limit:  # a rollout may be locked only to find that a guard fails
                are_busy = await self._connection.fetchval(_QUEUED, run_id, number + 1) > number
            for item in claims:
                assert isinstance(item.work, Claiming)
                mine, found = found[: item.work.limit], found[item.work.limit :]
                locked = []
                for position, revision, status, queue_position, text, attempts in mine:
                    rollout = decode(Rollout, text)
                    key: RowKey = (Rollout, (rollout.rollout_id,))
                    self._rows[key] = Stored(key, position, revision, run_id, status, queue_position)
                    locked.append((Row(rollout, revision), attempts))
                item.result = [row.record for row, _ in locked]
                try:
                    if locked:
                        works[item] = item.work.make_commit(locked)
                    elif are_busy:
                        self._busy_claims.append(item)
                except Exception as error:  # isolation point: as above
                    item.error = error
        return works | {item: item.work for item in items if not isinstance(item.work, Claiming)}

    async def _lock(self, keys: Iterable[RowKey]) -> None:
        """Locks rows and reads their state; spans need no lock, because they change only with their attempt's row."""
        by_kind: dict[type[Record], list[RowKey]] = {}
        for key in keys:
            by_kind.setdefault(key[0], []).append(key)
            self._rows[key] = None
        spans = by_kind.pop(Span, ())
        for kind in sorted(by_kind, key=list(COLUMNS).index):
            wanted = by_kind[kind]
            arrays = map(list, zip(*(map(_checked, key) for _, key in wanted), strict=True))
            for number, *values in await self._connection.fetch(LOCK[kind], *arrays):
                key = wanted[number - 1]
                state = dict(zip(_STATE.get(kind, _REVISION), values, strict=True))
                if state["revision"] is None:
                    self._busy.add(key)
                    continue
                parent = self._rows.get((Rollout, key[1][:1])) if kind is Attempt else None
                self._rows[key] = Stored(key, parent=parent, **state)
        await self._read_spans(spans)

    async def _read_spans(self, keys: Iterable[RowKey]) -> None:
        wanted = []
        for key in keys:
            attempt = self._rows[Attempt, key[1][:2]]
            if attempt is not None and attempt.last_span:  # every span has a number above 0
                wanted.append((key, attempt))
            _checked(key[1][2])
        if not wanted:
            return
        ids = [str(key[2]) for (_, key), _ in wanted]
        for number, position, revision in await self._connection.fetch(SPANS, [a.position for _, a in wanted], ids):
            key, attempt = wanted[number - 1]
            self._rows[key] = Stored(key, position, revision, attempt.run_id, parent=attempt)

    async def _delete(self) -> None:
        """Deletes rows with their attempts and spans, and counts these."""
        counts, by_kind = self.changes.counts, dict[type[Record], list[int | None]]()
        for row in self.changes.deleted:
            by_kind.setdefault(row.key[0], []).append(row.position)
        for kind, positions in by_kind.items():
            await self._connection.execute(f"DELETE FROM agl.{TABLES[kind]} WHERE position = ANY ($1)", positions)
        runs = {row.position: row.run_id for row in self.changes.deleted if row.key[0] is Rollout}
        attempts = by_kind.get(Attempt, [])
        for position, rollout in await self._connection.fetch(
            _DELETE_CHILDREN.format("attempt", "rollout", "rollout"), list(runs)
        ):
            attempts.append(position)
            counts["attempts", runs[rollout], ""] -= 1
        await self._connection.execute("DELETE FROM agl.part WHERE attempt = ANY ($1)", attempts)
        sql = _DELETE_CHILDREN.format("span", "attempt", "run_id")
        for _, run_id in await self._connection.fetch(sql, attempts):
            counts["spans", run_id, ""] -= 1


def _arrays(rows: Sequence[Stored], columns: Mapping[str, ColumnType]) -> list[list[Any]]:
    """Returns an array for each column, one of the revisions and one of the JSON."""
    values = [columns_of(row, index_key) for row in rows]
    arrays = []
    for column, kind in columns.items():
        array = [value[column] for value in values]
        if kind in _CHECKS:
            array = list(map(_CHECKS[kind], array))
        arrays.append(array)
    return [*arrays, [row.revision for row in rows], [row.text for row in rows]]


def index_key(value: object) -> str | None:
    """Returns the index key of a metadata value, equal only for equal values; None if the value is not indexed."""
    if isinstance(value, str):
        if len(value) <= LONGEST_LABEL and "\0" not in value:
            return f"s{value}"
        return "h" + sha256(value.encode(errors="surrogatepass")).hexdigest()
    if isinstance(value, (int, float)):
        whole = int(value) if value == value // 1 else None  # 1, 1.0 and True are equal
        return f"n{value if whole is None else whole}"
    return None


def _checked(value: Any) -> Any:
    """Returns an id that PostgreSQL can store.

    Raises:
        ConfigError: the id has a NUL, or half of a surrogate pair.
    """
    if isinstance(value, str):
        is_surrogate = not value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in value)
        if is_surrogate or "\0" in value:
            raise ConfigError(f"the id {value!r} has a character that PostgreSQL cannot store; remove it")
    return value


def _shown(text: str | None) -> str | None:
    """Returns a label as its column stores it, short enough for an index; the JSON has all of it."""
    return text[:LONGEST_LABEL].replace("\0", "\ufffd") if text else text


_CHECKS: Final = {"text": _checked, "label": _shown}
