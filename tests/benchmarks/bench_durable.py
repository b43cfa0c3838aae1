"""How fast the durable stores are beside the disk and server they are on: ``python tests/benchmarks/bench_durable.py``.

One rollout is: enqueue, claim, 10 spans in one batch, finish, wait, read its spans, everything acknowledged when it is
durable; 16 runners do this at once. The raw figure is one-row durable transactions of the same library on the same
disk and server, measured just before and just after, because disks change their mind. ``--flat N M`` shows what each
step costs one runner with N and with M finished rollouts in the store. PostgreSQL is a server of its own, made for this
run, with fsync on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

import asyncpg

from agentlightning.store.backend import Put
from agentlightning.store.engine import BackendStore
from agentlightning.types import Attempt, Rollout
from agentlightning_plugins.postgresql_store import PostgresLightningStore
from agentlightning_plugins.postgresql_store.backend import PostgresBackend
from agentlightning_plugins.sqlite_store import SqliteLightningStore
from agentlightning_plugins.sqlite_store.backend import SqliteBackend
from tests.benchmarks.bench_store import make_spans, measure_store
from tests.postgresql import PostgresServer, running_server

ROW = "x" * 1000


def measure_raw_sqlite(folder: Path, seconds: float = 1.5) -> float:
    """One-row durable transactions a second."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        connection = sqlite3.connect(Path(place) / "raw.db", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE row (id INTEGER PRIMARY KEY, text)")
        done = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO row (text) VALUES (?)", (ROW,))
            connection.execute("COMMIT")
            done += 1
        speed = done / (time.perf_counter() - start)
        connection.close()
        return speed


async def measure_raw_postgresql(url: str, seconds: float = 1.5) -> float:
    """One-row durable transactions a second, over one connection."""
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE IF NOT EXISTS row (id bigserial PRIMARY KEY, text text)")
    done = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        await connection.execute("INSERT INTO row (text) VALUES ($1)", ROW)
        done += 1
    speed = done / (time.perf_counter() - start)
    await connection.close()
    return speed


class SqlitePlace:
    """A folder for files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place: tempfile.TemporaryDirectory[str]

    def open(self) -> BackendStore:
        self._place = tempfile.TemporaryDirectory(dir=self._folder)
        return SqliteLightningStore(Path(self._place.name) / "store.db")

    def clean(self) -> None:
        self._place.cleanup()

    async def measure_raw(self) -> float:
        return measure_raw_sqlite(self._folder)


class PostgresPlace:
    """A server."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._database = ""

    def open(self) -> BackendStore:
        self._database = self._server.lend_database()
        return PostgresLightningStore(self._server.url(self._database))

    def clean(self) -> None:
        self._server.take_back(self._database)

    async def measure_raw(self) -> float:
        return await measure_raw_postgresql(self._server.url())


def transactions_of(store: BackendStore) -> int:
    backend = store._database.backend
    if isinstance(backend, SqliteBackend):
        return backend.writer.transactions
    assert isinstance(backend, PostgresBackend)
    return backend.transactions


async def fill(store: BackendStore, rollouts: int) -> None:
    """Stores finished rollouts with an attempt each, as fast as the backend takes them."""
    backend = store._database.backend
    for start in range(0, rollouts, 2000):
        writes = []
        for number in range(start, min(start + 2000, rollouts)):
            rollout = Rollout(
                rollout_id=f"ro-{number * 2654435761 % 2**40:016x}",
                input={"question": number},
                start_time=float(number),
                end_time=number + 1.0,
                status="succeeded",
                metadata={"group": number // 8, "step": number // 512},
            )
            attempt = Attempt(
                rollout_id=rollout.rollout_id,
                attempt_id=f"at-{number:016x}",
                sequence_id=1,
                start_time=float(number),
                status="succeeded",
                worker_id="runner",
            )
            writes += [Put(rollout), Put(attempt)]
        await backend.commit(writes)


async def measure_steps(store: BackendStore, rounds: int = 200) -> dict[str, float]:
    """Median milliseconds of each step with one runner: mostly the fsync."""
    took: dict[str, list[float]] = {}

    def note(step: str, start: float) -> float:
        now = time.perf_counter()
        took.setdefault(step, []).append(now - start)
        return now

    for task in range(rounds):
        clock = time.perf_counter()
        queued = await store.enqueue_rollout(task, metadata={"group": "flat"})
        clock = note("enqueue", clock)
        claimed = await store.dequeue_rollout("runner")
        clock = note("claim", clock)
        assert claimed is not None
        attempt_id = claimed.attempt.attempt_id
        await store.add_many_spans(make_spans(queued.rollout_id, attempt_id))
        clock = note("append", clock)
        await store.update_attempt(queued.rollout_id, attempt_id, status="succeeded")
        clock = note("finish", clock)
        await store.wait_for_rollouts([queued.rollout_id], timeout=1)
        clock = note("wait", clock)
        await store.query_spans(queued.rollout_id)
        clock = note("read", clock)
        await store.query_rollouts(status_in=["succeeded", "failed"], limit=10)
        clock = note("page", clock)
        await store.query_rollouts(metadata={"group": 3}, limit=10)
        clock = note("group", clock)
        await store.statistics()
        note("count", clock)
    return {step: statistics.median(times) * 1e3 for step, times in took.items()}


async def show_flatness(name: str, place: SqlitePlace | PostgresPlace, sizes: list[int]) -> None:
    columns = []
    for stored in sizes:
        store = place.open()
        await fill(store, stored)
        columns.append(await measure_steps(store))
        await store.close()
        place.clean()
    print(f"{name + ', ms':16}" + "".join(f"{stored:>12,}" for stored in sizes))
    for step in columns[0]:
        print(f"{step:16}" + "".join(f"{column[step]:12.3f}" for column in columns))


async def show_speed(name: str, place: SqlitePlace | PostgresPlace, rollouts: int) -> None:
    before = await place.measure_raw()
    store = place.open()
    speed = await measure_store(store, rollouts)
    grouped = transactions_of(store) / rollouts
    await store.close()
    place.clean()
    raw = (before + await place.measure_raw()) / 2
    share = f"{speed.wall / raw:.3f} of raw, at least 0.125 is wanted"
    print(
        f"{name}: {speed}, {grouped:.2f} transactions each; raw {raw:,.0f} durable transactions/s; {share}", flush=True
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where SQLite's files go")
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flat", type=int, nargs="+", metavar="N")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        places: dict[str, SqlitePlace | PostgresPlace] = {}
        if arguments.only != "postgresql":
            places["sqlite"] = SqlitePlace(arguments.folder)
        if arguments.only != "sqlite":
            places["postgresql"] = PostgresPlace(stack.enter_context(running_server()))
        for name, place in places.items():
            if arguments.flat:
                await show_flatness(name, place, arguments.flat)
            for _ in range(0 if arguments.flat else arguments.rounds):
                await show_speed(name, place, arguments.rollouts)


if __name__ == "__main__":
    asyncio.run(main())
