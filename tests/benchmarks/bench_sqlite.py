"""How fast the SQLite store is beside the disk it is on: ``python tests/benchmarks/bench_sqlite.py [--folder .]``.

One rollout is: enqueue, claim, 10 spans in one batch, finish, wait, read its spans, everything acknowledged when it is
durable; 16 runners do this at once. The raw figure is one-row durable transactions of the same library on the same
disk, measured just before and just after, because disks change their mind. ``--flat N M`` shows what each step costs
one runner with N and with M finished rollouts in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path

from agentlightning.store.backend import Put
from agentlightning.types import Attempt, Rollout
from agentlightning_plugins.sqlite_store import SqliteLightningStore
from agentlightning_plugins.sqlite_store.backend import SqliteBackend
from tests.benchmarks.bench_store import make_spans, measure_store

ROW = "x" * 1000


def measure_raw(folder: Path, seconds: float = 1.5) -> float:
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


def backend_of(store: SqliteLightningStore) -> SqliteBackend:
    backend = store._database.backend
    assert isinstance(backend, SqliteBackend)
    return backend


async def fill(store: SqliteLightningStore, rollouts: int) -> None:
    """Stores finished rollouts with an attempt each, as fast as the backend takes them."""
    backend = backend_of(store)
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


async def measure_steps(store: SqliteLightningStore, rounds: int = 200) -> dict[str, float]:
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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flat", type=int, nargs="+", metavar="N")
    arguments = parser.parse_args()
    if arguments.flat:
        columns = []
        for stored in arguments.flat:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
                store = SqliteLightningStore(Path(place) / "store.db")
                await fill(store, stored)
                columns.append(await measure_steps(store))
                await store.close()
        print(f"{'milliseconds':14}" + "".join(f"{stored:>12,}" for stored in arguments.flat))
        for step in columns[0]:
            print(f"{step:14}" + "".join(f"{column[step]:12.3f}" for column in columns))
        return
    for _ in range(arguments.rounds):
        before = measure_raw(arguments.folder)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            store = SqliteLightningStore(Path(place) / "store.db")
            speed = await measure_store(store, arguments.rollouts)
            grouped = backend_of(store).writer.transactions / arguments.rollouts
            await store.close()
        raw = (before + measure_raw(arguments.folder)) / 2
        share = f"{speed.wall / raw:.2f} of raw, at least 0.125 is wanted"
        print(f"{speed}, {grouped:.2f} transactions each; raw {raw:,.0f} one-row durable transactions/s; {share}")


if __name__ == "__main__":
    asyncio.run(main())
