"""A store in LMDB: ``agl.create_store("lmdb:///path")``. Each method of the backend is one transaction."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.event import Event
from agentlightning.plugin import (
    BackendStore,
    Claim,
    Component,
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
    hookimpl,
    key_of,
    make_test,
    read_field,
    sort_by,
)
from agentlightning.types import DEFAULT_RUN_ID, LIVE_ATTEMPT, Record, Rollout, Span

plugin_interface = 1
R = TypeVar("R", bound=Record)
T = TypeVar("T")
QUEUED = ("queuing", "requeuing")
COUNTED = {
    "rollouts": "Rollout",
    "attempts": "Attempt",
    "spans": "Span",
    "resources": "ResourcesUpdate",
    "workers": "Worker",
}


class LmdbStore(BackendStore):
    def __init__(self, path: str, *, run_id: str = DEFAULT_RUN_ID) -> None:
        super().__init__(LmdbBackend(path), run_id=run_id)

    @classmethod
    def from_url(cls, url: str, *, run_id: str, token: str | None) -> LmdbStore:
        if token is not None:
            raise ConfigError("an LMDB file is not served and takes no token")
        return cls(url.removeprefix("lmdb://"), run_id=run_id)


class Tables:
    """The records inside one transaction. A value is the JSON of a record with its revision and its position."""

    def __init__(self, transaction: Any) -> None:
        self.transaction = transaction

    def get(self, kind: str, key: Key) -> dict[str, Any] | None:
        found = self.transaction.get(place(kind, key))
        return None if found is None else json.loads(found)

    def set(self, kind: str, key: Key, value: dict[str, Any]) -> None:
        self.transaction.put(place(kind, key), json.dumps(value).encode())

    def scan(self, kind: str, key: Key = ()) -> Iterator[tuple[bytes, dict[str, Any]]]:
        prefix = place(kind, key).rstrip(b"]") if key else f"{kind}[".encode()
        cursor = self.transaction.cursor()
        for found, value in cursor.iternext() if cursor.set_range(prefix) else ():
            if not found.startswith(prefix):
                return
            yield found, json.loads(value)

    def next_number(self, counter: str) -> int:
        number = int(self.transaction.get(counter.encode(), b"0")) + 1
        self.transaction.put(counter.encode(), str(number).encode())
        return number

    def write(self, writes: Iterable[Write]) -> None:
        for write in writes:
            self.put(write.record) if isinstance(write, Put) else self.delete(write)

    def put(self, record: Record) -> None:
        kind, key = type(record).__name__, key_of(record)
        value = self.get(kind, key) or {"revision": 0, "position": self.next_number("#position"), "last": 0}
        if isinstance(record, Rollout) and record.status in QUEUED:
            was_queued = value["revision"] and value["record"]["status"] in QUEUED
            value["queued"] = value["queued"] if was_queued else self.next_number("#queue")
        if isinstance(record, Span):
            value["run_id"] = (self.get("Rollout", key[:1]) or {})["record"]["run_id"]
        self.set(kind, key, {**value, "record": record.model_dump(mode="json"), "revision": value["revision"] + 1})

    def delete(self, write: Delete) -> None:
        self.transaction.delete(place(write.kind.__name__, write.key))
        for kind in ("Attempt", "Span") if write.kind is Rollout else ():
            for found in [found for found, _ in self.scan(kind, write.key)]:
                self.transaction.delete(found)

    def attempt(self, key: Key) -> dict[str, Any]:
        if (found := self.get("Attempt", key)) is None:
            raise NotFoundError(f"no attempt {key[1]!r} of rollout {key[0]!r} in this store")
        return found


class LmdbBackend:
    durable = True

    def __init__(self, path: str) -> None:
        self._environment = importlib.import_module("lmdb").open(path, map_size=2**30)
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return time.time()

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        def work(tables: Tables) -> bool:
            for guard in guards:
                found = tables.get(guard.kind.__name__, guard.key)
                if (found["revision"] if found else 0) != guard.revision:
                    return False
            tables.write(writes)
            return True

        return await self._transact(work, lambda done: events if done else ())

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        events: Sequence[Event] = ()

        def work(tables: Tables) -> Sequence[Rollout]:
            nonlocal events
            found = [value for _, value in tables.scan("Rollout") if value["record"]["status"] in QUEUED]
            mine = [value for value in found if value["record"]["run_id"] == run_id]
            mine.sort(key=lambda value: (-value["record"]["priority"], value["queued"]))
            rows = [row_of(Rollout, value) for value in mine[:limit]]
            if not rows:
                return []
            counts = [sum(1 for _ in tables.scan("Attempt", (row.record.rollout_id,))) for row in rows]
            writes, events = decide(list(zip(rows, counts, strict=True)))
            tables.write(writes)
            return [row.record for row in rows]

        return await self._transact(work, lambda _: events)

    async def select(self, query: Query[R]) -> Page[R]:
        def work(tables: Tables) -> list[dict[str, Any]]:
            found = [value for _, value in tables.scan(query.kind.__name__)]
            return sorted(found, key=lambda value: value["position"])

        tests = [matcher(query.kind, condition) for condition in query.where]
        choices = [matcher(query.kind, condition) for condition in query.any_of]
        found = [
            (value["position"], row)
            for value in await asyncio.to_thread(self._read, work)
            if query.after is None or value["position"] > query.after
            for row in [row_of(query.kind, value)]
            if all(test(value, row.record) for test in tests)
            if not choices or any(test(value, row.record) for test in choices)
        ]
        if query.sort_by is not None:
            read = read_field(query.sort_by)
            sort_by(found, lambda item: read(item[1].record), query.descending)
        elif query.descending:
            found.reverse()
        rows = found[query.offset : None if query.limit < 0 else query.offset + query.limit]
        position = rows[-1][0] if rows and query.sort_by is None and not query.descending else None
        return Page([row for _, row in rows], len(found) if query.count else None, position)

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        def work(tables: Tables) -> Sequence[Span | None]:
            attempts = {key: tables.attempt(key) for key in dict.fromkeys(key_of(span)[:2] for span in spans)}
            result: list[Span | None] = []
            for span in spans:
                attempt = attempts[key_of(span)[:2]]
                if tables.get("Span", key_of(span)) is not None:
                    result.append(None)
                    continue
                number = span.sequence_id or attempt["last"] + 1
                attempt["last"] = max(number, attempt["last"])
                numbered = span.model_copy(update={"sequence_id": number})
                tables.put(numbered)
                result.append(numbered)
            for key, attempt in attempts.items():
                if attempt["record"]["status"] in LIVE_ATTEMPT:
                    attempt["record"]["last_heartbeat_time"] = now
                tables.set("Attempt", key, attempt)
            return result

        return await self._transact(work)

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        def work(tables: Tables) -> Sequence[int]:
            numbers = []
            for key in attempts:
                attempt = tables.attempt(key)
                numbers.append(attempt["last"] + 1)
                tables.set("Attempt", key, {**attempt, "last": numbers[-1]})
            return numbers

        return await self._transact(work)

    async def count(self) -> dict[str, int]:
        return self._read(lambda tables: {name: sum(1 for _ in tables.scan(kind)) for name, kind in COUNTED.items()})

    def watch(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def close(self) -> None:
        self._environment.close()

    def _read(self, work: Callable[[Tables], T]) -> T:
        with self._environment.begin() as transaction:
            return work(Tables(transaction))

    async def _transact(
        self, work: Callable[[Tables], T], events_of: Callable[[T], Sequence[Event]] = lambda _: ()
    ) -> T:
        def transact() -> T:
            with self._lock:  # commits and their events have one order
                with self._environment.begin(write=True) as transaction:
                    done = work(Tables(transaction))
                if events := events_of(done):
                    for listener in list(self._listeners):
                        listener(events)
                return done

        return await asyncio.to_thread(transact)


def place(kind: str, key: Key) -> bytes:
    return f"{kind}{json.dumps(key)}".encode()


def row_of(kind: type[R], value: dict[str, Any]) -> Row[R]:
    return Row(kind.model_validate(value["record"]), value["revision"])


def matcher(kind: type[Record], condition: Condition) -> Callable[[dict[str, Any], Record], bool]:
    if kind is Span and condition.field == "run_id":  # a span has the run of its rollout
        run_ids = [condition.value] if condition.op == "eq" else condition.value
        return lambda value, record: value["run_id"] in run_ids
    test = make_test(condition, read_field(condition.field))
    return lambda value, record: test(record)


@hookimpl
def components() -> list[Component]:
    return [Component("store", "lmdb", f"{__name__}:LmdbStore", summary="records in LMDB")]
