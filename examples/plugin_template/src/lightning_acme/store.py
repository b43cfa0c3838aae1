"""``folder:///path``: a store in one journal file, read whole when it is opened. For one process and small runs.

Lightning implements rollouts, attempts and leases; a database implements only the nine methods of ``Backend``.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.event import Event
from agentlightning.plugin import (
    KEYS,
    BackendStore,
    Claim,
    Condition,
    Delete,
    Guard,
    Key,
    Listener,
    Page,
    Put,
    Query,
    Row,
    Write,
    key_of,
)
from agentlightning.types import DEFAULT_RUN_ID, LIVE_ATTEMPT, Attempt, Record, Rollout, Span

R = TypeVar("R", bound=Record)
_KINDS = {kind.__name__: kind for kind in KEYS}
_QUEUED = ("queuing", "requeuing")


class FolderStore(BackendStore):
    """A store whose records are in ``journal.jsonl`` of a folder."""

    def __init__(self, folder: str | Path, *, run_id: str = DEFAULT_RUN_ID, lease_s: float = 60.0) -> None:
        """Opens the folder, and creates it if it is missing.

        Raises:
            ConfigError: another process has the folder open.
        """
        super().__init__(FolderBackend(Path(folder)), run_id=run_id, lease_s=lease_s)

    @classmethod
    def from_url(cls, url: str, *, run_id: str, token: str | None) -> FolderStore:
        """Opens ``folder:///path``, for ``create_store``."""
        if token is not None:
            raise ConfigError("a folder is not served and takes no token")
        return cls(url.removeprefix("folder://"), run_id=run_id)


class FolderBackend:
    """Tables in dictionaries, and a journal that is flushed to disk before a write is acknowledged.

    One thread writes, because waiting for the disk would block the caller's event loop. Any thread reads.
    """

    durable = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = (folder / "journal.jsonl").open("a+b")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._journal.close()
            raise ConfigError(f"{folder} is open in another process") from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="folder")
        self._lock = threading.Lock()
        self._tables: dict[type[Record], dict[Key, Row[Any]]] = {kind: {} for kind in KEYS}
        self._positions: dict[type[Record], dict[Key, int]] = {kind: {} for kind in KEYS}
        self._last_position = 0
        self._queue: dict[str, None] = {}
        self._last_sequence_ids: dict[Key, int] = {}
        self._listeners: list[Listener] = []
        self._replay_journal()

    def now(self) -> float:
        return time.time()

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._commit, writes, guards, events)

    def _commit(self, writes: Sequence[Write], guards: Sequence[Guard], events: Sequence[Event]) -> bool:
        with self._lock:
            for guard in guards:
                row = self._tables[guard.kind].get(guard.key)
                if (0 if row is None else row.revision) != guard.revision:
                    return False
            self._write(writes, events)
        return True

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._claim, run_id, limit, decide)

    def _claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        with self._lock:
            rollouts = [self._tables[Rollout][rollout_id,] for rollout_id in self._queue]
            rollouts.sort(key=lambda row: -row.record.priority)  # equal ones stay in the order of the queue
            rows = list(islice((row for row in rollouts if row.record.run_id == run_id), limit))
            if not rows:
                return []
            counts = [sum(key[0] == row.record.rollout_id for key in self._tables[Attempt]) for row in rows]
            self._write(*decide(list(zip(rows, counts, strict=True))))
            return [row.record for row in rows]

    async def select(self, query: Query[R]) -> Page[R]:
        with self._lock:
            positions = self._positions[query.kind]
            found = [
                (positions[key], row)
                for key, row in self._tables[query.kind].items()
                if (query.after is None or positions[key] > query.after)
                and all(self._holds(condition, row.record) for condition in query.where)
                and (not query.any_of or any(self._holds(condition, row.record) for condition in query.any_of))
            ]
        if query.sort_by is not None:
            field = query.sort_by
            found.sort(key=lambda item: _sort_key(_read(item[1].record, field)), reverse=query.descending)
        elif query.descending:
            found.reverse()
        end = None if query.limit < 0 else query.offset + query.limit
        rows = found[query.offset : end]
        position = rows[-1][0] if rows and query.sort_by is None and not query.descending else None
        return Page([row for _, row in rows], len(found) if query.count else None, position)

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._append_spans, spans, now)

    def _append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        with self._lock:
            attempts = {(span.rollout_id, span.attempt_id) for span in spans}
            self._check(attempts)
            stored: dict[Key, Span] = {}
            result: list[Span | None] = []
            for span in spans:
                key = key_of(span)
                if key in stored or key in self._tables[Span]:
                    result.append(None)
                    continue
                number = span.sequence_id or self._last_sequence_ids.get(key[:2], 0) + 1
                self._last_sequence_ids[key[:2]] = max(number, self._last_sequence_ids.get(key[:2], 0))
                stored[key] = span.model_copy(update={"sequence_id": number})
                result.append(stored[key])
            self._write([Put(span) for span in stored.values()], (), {"alive": sorted(attempts), "time": now})
            self._keep_alive(attempts, now)
            return result

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._next_sequence_ids, attempts)

    def _next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        with self._lock:
            self._check(set(attempts))
            result = []
            for key in attempts:
                self._last_sequence_ids[key] = self._last_sequence_ids.get(key, 0) + 1
                result.append(self._last_sequence_ids[key])
            self._append([{"numbered": [*key, self._last_sequence_ids[key]]} for key in set(attempts)])
            return result

    async def count(self) -> dict[str, int]:
        names = {
            "Rollout": "rollouts",
            "Attempt": "attempts",
            "Span": "spans",
            "ResourcesUpdate": "resources",
            "Worker": "workers",
        }
        with self._lock:
            return {plural: len(self._tables[_KINDS[name]]) for name, plural in names.items()}

    def watch(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.shutdown)
        self._journal.close()

    def _write(self, writes: Sequence[Write], events: Sequence[Event], *notes: dict[str, Any]) -> None:
        """Writes the journal first, so that acknowledged writes are on disk; events are sent in the journal's order."""
        lines: list[dict[str, Any]] = [
            {"put": type(write.record).__name__, "record": write.record.model_dump(mode="json")}
            if isinstance(write, Put)
            else {"delete": write.kind.__name__, "key": write.key}
            for write in writes
        ]
        self._append([*lines, *notes])
        for write in writes:
            self._apply(write)
        if events:
            for listener in list(self._listeners):
                listener(events)

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Appends one line for a transaction: if a crash cuts the line off, the transaction was never acknowledged."""
        if lines:
            self._journal.write(json.dumps(lines).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())

    def _replay_journal(self) -> None:
        """Reads the journal, and removes a last line that a crash cut off: the next write would be appended to it."""
        self._journal.seek(0)
        end = 0
        for line in self._journal:
            if not line.endswith(b"\n"):
                self._journal.truncate(end)
                break
            self._replay(json.loads(line))
            end += len(line)

    def _replay(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            if "put" in line:
                record = _KINDS[line["put"]].model_validate(line["record"])
                self._apply(Put(record))
                if isinstance(record, Span):
                    key = key_of(record)[:2]
                    self._last_sequence_ids[key] = max(record.sequence_id, self._last_sequence_ids.get(key, 0))
            elif "delete" in line:
                self._apply(Delete(_KINDS[line["delete"]], tuple(line["key"])))
            elif "alive" in line:
                self._keep_alive([tuple(key) for key in line["alive"]], line["time"])
            else:
                rollout_id, attempt_id, number = line["numbered"]
                self._last_sequence_ids[rollout_id, attempt_id] = number

    def _apply(self, write: Write) -> None:
        if isinstance(write, Delete):
            self._remove(write.kind, write.key)
            return
        record = write.record
        kind, key = type(record), key_of(record)
        before = self._tables[kind].get(key)
        self._tables[kind][key] = Row(record, 1 if before is None else before.revision + 1)
        if before is None:
            self._last_position += 1
            self._positions[kind][key] = self._last_position
        if isinstance(record, Rollout):
            was_queued = before is not None and before.record.status in _QUEUED
            if record.status not in _QUEUED:
                self._queue.pop(record.rollout_id, None)
            elif not was_queued:
                self._queue[record.rollout_id] = None

    def _keep_alive(self, attempts: Iterable[Key], now: float) -> None:
        for key in attempts:
            row = self._tables[Attempt][key]
            if row.record.status in LIVE_ATTEMPT:  # a heartbeat does not change the revision
                alive = row.record.model_copy(update={"last_heartbeat_time": now})
                self._tables[Attempt][key] = Row(alive, row.revision)

    def _remove(self, kind: type[Record], key: Key) -> None:
        if self._tables[kind].pop(key, None) is None:
            return
        self._positions[kind].pop(key)
        if kind is Rollout:
            self._queue.pop(str(key[0]), None)
            for child in (Attempt, Span):
                for child_key in [found for found in self._tables[child] if found[0] == key[0]]:
                    self._remove(child, child_key)
            for numbered in [found for found in self._last_sequence_ids if found[0] == key[0]]:
                del self._last_sequence_ids[numbered]

    def _check(self, attempts: set[tuple[str, str]]) -> None:
        for rollout_id, attempt_id in attempts:
            if (rollout_id, attempt_id) not in self._tables[Attempt]:
                raise NotFoundError(f"no attempt {attempt_id!r} of rollout {rollout_id!r} in this store")

    def _holds(self, condition: Condition, record: Record) -> bool:
        if condition.field == "run_id" and isinstance(record, Span):
            value = self._tables[Rollout][record.rollout_id,].record.run_id
        else:
            value = _read(record, condition.field)
        match condition.op:
            case "eq":
                return bool(value == condition.value)
            case "in":
                return value in condition.value
            case "contains":
                return isinstance(value, str) and condition.value in value
        try:
            return bool(value >= condition.value) if condition.op == "ge" else bool(value <= condition.value)
        except TypeError:  # None, or values that have no order
            return False


def _read(record: Record, field: str) -> Any:
    name, dot, key = field.partition(".")
    value = getattr(record, name)
    return value if not dot else value.get(key) if isinstance(value, dict) else None


def _sort_key(value: Any) -> tuple[bool, str, Any]:
    """Sorts None first, and values of different types, which metadata may have, by type."""
    if value is None or isinstance(value, (bool, int, float)):
        return value is not None, "", value or 0
    if isinstance(value, str):
        return True, "str", value
    if isinstance(value, Record):
        return True, "record", value.model_dump_json()
    return True, type(value).__name__, json.dumps(value, sort_keys=True)
