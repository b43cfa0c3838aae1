"""Speed of durable stores, compared with their disk or database server: ``python tests/benchmarks/bench_durable.py``.

One rollout is: enqueue, claim, 10 spans in one batch, finish, wait, read its spans, everything acknowledged when it is
durable; 16 runners do this concurrently. The raw figure is one-row durable transactions of the same library on the same
disk and server, measured just before and just after, because the speed of disks varies. ``--flat N M`` shows the time
of each step for one runner with N and with M finished rollouts in the store. The PostgreSQL server is started for this
run, with fsync on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from agentlightning.store.engine import BackendStore
from agentlightning.types import Attempt, Rollout
from agentlightning_plugins.shared.garbage_collection import relax_collector
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.metrics import ServerMetrics
from agentlightning_plugins.stores.http.server.polling import Polls
from agentlightning_plugins.stores.postgresql.store import PostgresBackend, PostgresLightningStore
from agentlightning_plugins.stores.shared.sql.document import encode
from agentlightning_plugins.stores.sqlite.store import SqliteBackend, SqliteLightningStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.bench_store import make_spans, measure_store
from tests.postgresql import PostgresServer, running_server

ROW = "x" * 1000


def measure_raw_sqlite(folder: Path, seconds: float = 1.5) -> float:
    """Returns the number of durable one-row transactions per second."""
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
    """Returns the number of durable one-row transactions per second over one connection."""
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
    """A temporary folder for SQLite's files."""

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
    """A database on a PostgreSQL server."""

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


FILL_SQLITE = (
    """WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :rollouts),
    named AS (SELECT i, printf('ro-%016x', i * 2654435761 % 1099511627776) AS id FROM n)
    INSERT INTO rollout (rollout_id, run_id, status, start_time, end_time, group_id, step, revision, record)
    SELECT id, 'default', 'succeeded', i * 1.0, i * 1.0, i / 8, i / 512, 1,
        replace(replace(replace(replace(:rollout, 'ro-', id), '1111111', i), '2222222', i / 8), '3333333', i / 512)
    FROM named""",
    """INSERT INTO attempt (rollout, attempt_id, sequence_id, status, worker_id, revision, record)
    SELECT position, printf('at-%016x', position), 1, 'succeeded', 'runner', 1,
        replace(replace(replace(:attempt, 'ro-', rollout_id), 'at-', printf('at-%016x', position)), '1111111', position)
    FROM rollout""",
    "INSERT INTO tally VALUES ('rollouts', 'default', 'succeeded', :rollouts), ('attempts', 'default', '', :rollouts)",
)
FILL_POSTGRESQL = (
    """INSERT INTO agl.rollout (rollout_id, run_id, status, start_time, end_time, group_id, step, revision, record)
    SELECT id, 'default', 'succeeded', i, i, 'n' || i / 8, 'n' || i / 512, 1,
        replace(replace(replace(replace($2, 'ro-', id), '1111111', i::text), '2222222', (i / 8)::text),
            '3333333', (i / 512)::text)
    FROM (SELECT i, 'ro-' || lpad(to_hex(i * 2654435761 % 1099511627776), 16, '0') AS id
        FROM generate_series(0, $1::bigint - 1) AS i) AS named ORDER BY i""",
    """INSERT INTO agl.attempt (rollout, attempt_id, sequence_id, status, live, worker_id, revision, record)
    SELECT position, 'at-' || lpad(to_hex(position), 16, '0'), 1, 'succeeded', false, 'runner', 1,
        replace(replace(replace($1, 'ro-', rollout_id), 'at-', 'at-' || lpad(to_hex(position), 16, '0')),
            '1111111', position::text)
    FROM agl.rollout ORDER BY position""",
    """INSERT INTO agl.tally VALUES
        ('rollouts', 'default', 'succeeded', $1::bigint), ('attempts', 'default', '', $1::bigint)""",
)


async def fill(store: BackendStore, rollouts: int) -> None:
    """Fills an empty database with finished rollouts of one attempt each, which the database itself generates."""
    times = {"start_time": 1111111.0, "end_time": 1111111.0}
    metadata = {"group": 2222222, "step": 3333333}
    rollout = encode(
        Rollout.model_validate(
            {"rollout_id": "ro-", "input": 1111111, "status": "succeeded", "metadata": metadata, **times}
        )
    )
    attempt = encode(
        Attempt.model_validate(
            {"rollout_id": "ro-", "attempt_id": "at-", "sequence_id": 1, "status": "succeeded", **times}
        )
    )
    backend = store._database.backend
    if isinstance(backend, SqliteBackend):
        values = {"rollouts": rollouts, "rollout": rollout, "attempt": attempt}
        for statement in FILL_SQLITE:
            await backend.writer.submit(lambda transaction, sql=statement: transaction._execute(sql, values))
        return
    assert isinstance(backend, PostgresBackend)
    connection = await backend._thread.server.connect()
    for statement, values_of in zip(FILL_POSTGRESQL, ((rollouts, rollout), (attempt,), (rollouts,)), strict=True):
        await connection.execute(statement, *values_of)
    await connection.close()


async def measure_steps(store: BackendStore, rounds: int = 200) -> dict[str, float]:
    """Returns the median milliseconds of each step with one runner, which are mostly spent in fsync."""
    took: dict[str, list[float]] = {}
    metrics = ServerMetrics(store, Polls(), EventStreams(store.with_run))

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
        clock = note("count", clock)
        await metrics.render()
        note("scrape", clock)
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
    wanted = 0.125 if name == "sqlite" else 0.08
    share = f"{speed.wall / raw:.3f} of raw (target at least {wanted})"
    print(
        f"{name}: {speed}, {grouped:.2f} transactions each; raw {raw:,.0f} durable transactions/s; {share}", flush=True
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of SQLite's files")
    parser.add_argument("--only", choices=["sqlite", "postgresql"])
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flat", type=int, nargs="+", metavar="N")
    arguments = parser.parse_args()
    relax_collector()  # as `agl store` does
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
