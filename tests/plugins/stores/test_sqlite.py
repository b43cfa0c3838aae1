"""The SQLite store: conformance, faults, files and schema versions, and the cost of operations."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pytest
from click.testing import CliRunner

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import RolloutEnqueued
from agentlightning.store import Retention
from agentlightning.store.backend import Put
from agentlightning.testing.store import DurableStoreConformance
from agentlightning.testing.store.model import Reopen
from agentlightning.types import Attempt, Rollout, Span
from agentlightning_plugins.stores.http.command import command
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.metrics import ServerMetrics
from agentlightning_plugins.stores.http.server.polling import Polls
from agentlightning_plugins.stores.shared.sql.parts import SharedParts
from agentlightning_plugins.stores.sqlite import schema
from agentlightning_plugins.stores.sqlite.store import SqliteBackend, SqliteLightningStore
from agentlightning_plugins.stores.sqlite.transaction import Transaction
from tests.plugins.stores.actions import claim, finish, make_span, number_deleted
from tests.plugins.stores.semantics import DurableSemantics


class TestSqliteLightningStore(DurableSemantics, DurableStoreConformance):
    @pytest.fixture
    async def opened(self, quick_path: Path) -> AsyncIterator[list[SqliteLightningStore]]:
        """The stores that the test has opened in ``quick_path``; the last one is open."""
        stores: list[SqliteLightningStore] = []
        yield stores
        await stores[-1].close()

    @pytest.fixture
    async def store(self, quick_path: Path, opened: list[SqliteLightningStore]) -> SqliteLightningStore:
        opened.append(SqliteLightningStore(quick_path / "store.db", watchdog_interval_s=0.05))
        return opened[-1]

    @pytest.fixture
    def reopen(self, quick_path: Path, opened: list[SqliteLightningStore]) -> Reopen:
        async def reopen() -> SqliteLightningStore:
            await opened[-1].close()
            opened.append(SqliteLightningStore(quick_path / "store.db", watchdog_interval_s=0.05))
            return opened[-1]

        return reopen


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "store.db")
    yield backend
    await backend.close()


def check_integrity(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# --- faults ---


async def test_a_full_disk_is_reported_and_damages_no_data(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    kept = await store.enqueue_rollout("kept")
    connection = store._database.backend.writer._connection  # to make the disk full
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(StoreError, match="disk is full"):
        await store.enqueue_rollout("x" * 100_000)
    outcomes = await asyncio.gather(
        *(store.enqueue_rollout("x" * 100_000 if n % 2 else n) for n in range(8)), return_exceptions=True
    )
    assert [isinstance(outcome, StoreError) for outcome in outcomes] == [False, True] * 4
    connection.execute("PRAGMA max_page_count = 1000000")
    await store.enqueue_rollout("y" * 100_000)
    inputs = [rollout.input for rollout in await store.query_rollouts()]
    assert inputs == ["kept", 0, 2, 4, 6, "y" * 100_000]
    assert (await store.statistics())["rollouts"] == 6
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == kept.rollout_id
    await store.close()
    check_integrity(path)


class FullAtCommit:
    """A connection whose disk is full at the first two commits of a transaction that wrote something."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._left = 2
        self._written_before = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            self._written_before = self._connection.total_changes
        if sql == "COMMIT" and self._left and self._connection.total_changes > self._written_before:
            self._left -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return self._connection.execute(sql, *parameters)


async def test_a_claim_whose_transaction_is_rolled_back_returns_no_rollout(tmp_path: Path) -> None:
    store = SqliteLightningStore(str(tmp_path / "store.db"), watchdog_interval_s=None)
    backend = store._database.backend
    assert isinstance(backend, SqliteBackend)
    backend.writer._connection = FullAtCommit(backend.writer._connection)
    # Both share a transaction, whose commit fails; each is then retried in its own, and the enqueue fails again.
    enqueued, claimed = await asyncio.gather(
        backend.commit([Put(Rollout(rollout_id="ro-1", input=1, start_time=1.0))]),
        store._queue.claim_now("default", 1, None),
        return_exceptions=True,
    )
    assert isinstance(enqueued, StoreError)
    assert claimed == []
    assert (await store.statistics())["attempts"] == 0
    await store.close()


async def test_a_read_only_file_is_reported(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    await store.enqueue_rollout("a")
    connection = store._database.backend.writer._connection  # not by chmod: root may write any file
    connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="read-only"):
        await store.enqueue_rollout("b")
    assert len(await store.query_rollouts()) == 1
    await store.close()


# --- files ---


@pytest.mark.parametrize("content", [b"not a database, but a text of some length" * 40, b"x"])
def test_a_file_that_is_not_a_database_is_refused_and_left_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not an SQLite database"):
        SqliteLightningStore(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_another_programs_database_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "mail.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE message (text)")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="another program"):
        SqliteLightningStore(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


async def test_spans_of_the_first_version_are_read_and_further_ones_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        patch.setattr(SharedParts, "split", lambda self, row: [])  # as that version wrote them
        store = SqliteLightningStore(path)
        claimed = await store.start_rollout("a")
        await store.add_span(make_span(claimed, text="text " * 1000))
        await store.close()
    store = SqliteLightningStore(path)
    await store.add_span(make_span(claimed, text="text " * 1001))
    found = await store.query_spans(claimed.rollout_id)
    assert [span.attributes["text"] for span in found] == ["text " * 1000, "text " * 1001]
    await store.close()


async def test_shared_parts_of_a_transaction_that_was_rolled_back_are_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    claimed = await store.start_rollout("a")
    with monkeypatch.context() as patch:
        finish = Transaction.finish

        def fail(self: Transaction, origin: int) -> None:
            finish(self, origin)
            assert self._execute("SELECT count(*) FROM part").fetchone() == (1,)
            raise sqlite3.IntegrityError

        patch.setattr(Transaction, "finish", fail)
        with pytest.raises(StoreError):
            await store.add_span(make_span(claimed, text="text " * 1000))
    await store.add_span(make_span(claimed, text="text " * 1000 + "more " * 1000))
    (found,) = await store.query_spans(claimed.rollout_id)
    assert found.attributes["text"] == "text " * 1000 + "more " * 1000
    await store.close()


async def test_a_file_of_a_newer_version_is_refused_and_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ("CREATE TABLE news (text)",)))
        store = SqliteLightningStore(path)
        await store.enqueue_rollout("a")
        await store.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="newer version"):
        SqliteLightningStore(path)
    assert path.read_bytes() == before


async def test_a_migration_is_applied_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    await store.create_run("kept")
    await store.close()
    before, released = read_schema(path), schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", (*released, ("ALTER TABLE run ADD COLUMN color", "ALTER TABLE nonsense")))
    with pytest.raises(StoreError):
        SqliteLightningStore(path)
    assert read_schema(path) == before
    fill = ("ALTER TABLE run ADD COLUMN color", "UPDATE run SET color = 'red'")
    monkeypatch.setattr(schema, "MIGRATIONS", (*released, fill, ("ALTER TABLE run RENAME COLUMN color TO colour",)))
    store = SqliteLightningStore(path)
    assert [run.name for run in await store.query_runs()] == ["kept"]
    await store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("SELECT colour FROM run").fetchall() == [("red",)]
        assert connection.execute("PRAGMA user_version").fetchall() == [(len(released) + 2,)]


async def test_the_previous_version_can_still_write_after_a_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    old = SqliteLightningStore(path)
    await old.enqueue_rollout("before", metadata={"task_id": 1})
    add = ("CREATE INDEX rollout_color ON rollout (json_extract(record, '$.color'))",)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, add))
    new = SqliteLightningStore(path)
    await old.enqueue_rollout("after", metadata={"task_id": 1})
    found = await new.query_rollouts(metadata={"task_id": 1})
    assert [rollout.input for rollout in found] == ["before", "after"]
    assert len(await new.dequeue_many_rollouts(limit=9)) == 2
    assert {rollout.status for rollout in await old.query_rollouts()} == {"preparing"}
    await old.close()
    await new.close()
    check_integrity(path)


def read_schema(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection, connection:
        found = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        found += connection.execute("PRAGMA user_version").fetchall()
    return found


def test_the_schema_version_is_read_consistently_while_another_process_creates_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    class Interrupted(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            cursor = super().execute(sql, *parameters)
            if sql == "PRAGMA application_id":
                schema.open_file(path, 1.0)
            return cursor

    with closing(sqlite3.connect(path)) as first:
        first.execute("PRAGMA journal_mode = WAL")
    with closing(sqlite3.connect(path, factory=Interrupted)) as connection:
        assert schema._read_version(connection, path) == 0
        assert schema._read_version(connection, path) == len(schema.MIGRATIONS)


async def test_several_stores_can_create_the_same_file_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    stores = await asyncio.gather(*(asyncio.to_thread(SqliteLightningStore, path) for _ in range(6)))
    await asyncio.gather(*(store.enqueue_rollout(number) for number, store in enumerate(stores)))
    assert len(await stores[0].query_rollouts()) == 6
    for store in stores:
        await store.close()


async def test_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///runs/store.db", f"sqlite:///{tmp_path}/runs/store.db"):
        store = SqliteLightningStore.from_url(url, run_id="mine")
        await store.enqueue_rollout(url)
        assert store.run_id == "mine"
        await store.close()
    assert list((tmp_path / "runs").iterdir()) == [tmp_path / "runs" / "store.db"]
    with closing(sqlite3.connect("runs/store.db")) as connection, connection:
        assert connection.execute("SELECT count(*) FROM rollout").fetchall() == [(2,)]
    for url in ("sqlite://", "sqlite:///", "sqlite://host/store.db", "sqlite:///:memory:"):
        with pytest.raises(ConfigError, match="sqlite:///store.db"):
            SqliteLightningStore.from_url(url)
    with pytest.raises(ConfigError, match="token"):
        SqliteLightningStore.from_url("sqlite:///store.db", token="secret")


async def test_a_waiter_that_missed_events_reads_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentlightning_plugins.stores.shared.sql.batch.KEPT_EVENTS", 3)
    here, there = SqliteLightningStore(tmp_path / "store.db"), SqliteLightningStore(tmp_path / "store.db")
    claimed = await claim(here)
    waiting = asyncio.create_task(here.wait_for_rollouts([claimed.rollout_id], timeout=300))
    await asyncio.sleep(0.05)
    writer = here._database.backend.writer  # to suspend its polling
    monkeypatch.setattr(writer, "_look", lambda: None)
    await asyncio.sleep(0.05)
    await there.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    await asyncio.gather(*(there._database.backend.commit([], (), [RolloutEnqueued(rollout_id="x")]) for _ in range(9)))
    for number in range(70):
        await there.enqueue_rollout(number)
    assert not waiting.done()
    monkeypatch.delattr(writer, "_look")
    (done,) = await waiting
    assert done.status == "succeeded"
    assert "missed events" in caplog.text
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection, connection:
        assert connection.execute("SELECT count(*) FROM event").fetchone()[0] < 3 + 64
    await here.close()
    await there.close()


def test_a_connection_to_a_file_that_is_not_a_database_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"not a database " * 100)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        schema.connect(path, 1.0)
    connection = caught.traceback[-1].frame.f_locals["connection"]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


async def test_a_store_that_is_garbage_collected_in_one_of_its_threads_is_closed(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path / "store.db")
    await backend.count()
    readers, idle = backend._pool, backend._idle
    await asyncio.wrap_future(readers.submit(backend.stop))
    assert not idle
    with pytest.raises(RuntimeError, match="after shutdown"):
        readers.submit(backend.stop)


# --- cost ---


async def test_operations_cost_the_same_with_few_and_many_stored_rollouts(tmp_path: Path) -> None:
    """Counts steps of SQLite's virtual machine, which do not depend on the load of the computer."""
    steps = {stored: await count_steps(tmp_path / f"{stored}.db", stored) for stored in (200, 8000)}
    for name, few in steps[200].items():
        many = steps[8000][name]
        assert many < 2 * few + 200, f"{name}: {few} steps with 200 rollouts, {many} with 8,000"


async def count_steps(path: Path, stored: int) -> dict[str, int]:
    store = SqliteLightningStore(path, watchdog_interval_s=None)
    backend = store._database.backend
    assert isinstance(backend, SqliteBackend)
    writes: list[Put] = []
    for n in range(stored):
        metadata = {"group": n // 4, "task_id": f"t{n}", "step": n // 64}
        writes.append(
            Put(Rollout(rollout_id=f"old-{n}", input=n, start_time=0.0, status="succeeded", metadata=metadata))
        )
        writes.append(
            Put(Attempt(rollout_id=f"old-{n}", attempt_id="at", sequence_id=1, start_time=0.0, status="succeeded"))
        )
    await backend.commit(writes)
    spans = [Span.from_attributes(attributes={}, rollout_id=f"old-{n}", attempt_id="at") for n in range(stored)]
    await backend.append_spans(spans, 1.0)
    with backend._connection() as reader:
        connections = [reader, backend.writer._connection]
    backend._pool._max_workers = 1  # so that there is one reader, and it is counted
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    metrics = ServerMetrics(store, Polls(), EventStreams(store.with_run))
    keep_all = Retention(max_age_s=9.0, max_rollouts=10**6)
    operations: dict[str, Callable[[], Awaitable[object]]] = {
        "enqueue": lambda: store.enqueue_rollout("new", metadata={"group": "new"}),
        "claim": lambda: claim(store),
        "append": lambda: store.add_many_spans([make_span(claimed) for _ in range(3)]),
        "wait": lambda: store.wait_for_rollouts([claimed.rollout_id], timeout=0),
        "get": lambda: store.get_rollout_by_id(claimed.rollout_id),
        "attempts": lambda: store.query_attempts(claimed.rollout_id),
        "spans": lambda: store.query_spans("old-3"),
        "live": lambda: store.query_rollouts(status_in=["preparing", "running"], limit=5),
        "ended": lambda: store.query_rollouts(status_in=["succeeded", "failed"], limit=5),
        "first page": lambda: store.query_rollouts(limit=5),
        "group": lambda: store.query_rollouts(metadata={"group": 3}),
        "page of a group": lambda: store.query_rollouts(metadata={"group": 3}, limit=10),
        "spans of a run": lambda: store.query_spans(None, limit=5),
        "heartbeat": lambda: store.update_worker("worker-1"),
        "statistics": lambda: store.statistics(),
        "how many": lambda: store.query_rollouts(status_in=["succeeded", "failed"], limit=0),
        "scrape": metrics.render,
        "nothing to delete": lambda: number_deleted(keep_all, store, 1.0),
        "finish": lambda: finish(store, claimed),
    }
    for rollout in await store.dequeue_many_rollouts(limit=9):
        raise AssertionError(f"{rollout.rollout_id} was not queued")
    claimed = await claim(store)
    steps = {}
    for connection in connections:  # once: SQLite deadlocks if a thread sets it while another runs a statement with it
        connection.set_progress_handler(step, 10)
    for name, operation in operations.items():
        count = 0
        await operation()
        steps[name] = count * 10
        if name == "enqueue":
            await store.dequeue_rollout()
    await store.close()
    return steps


async def test_the_file_shrinks_when_rollouts_are_deleted(quick_path: Path) -> None:
    path = quick_path / "store.db"
    store = SqliteLightningStore(path)
    await fill_and_delete(store)
    for _ in range(400):  # each write releases some of the free pages
        await store.update_worker("worker")
    await store.close()
    assert path.stat().st_size < 10_000_000


async def fill_and_delete(store: SqliteLightningStore) -> None:
    """Stores and deletes 20 MB."""
    for _ in range(20):
        claimed = await store.start_rollout("large")
        await store.add_many_spans([make_span(claimed, text=token_urlsafe(100_000)) for _ in range(10)])
        await finish(store, claimed)
    assert await store.delete_rollouts(keep=0) >= 20


async def test_compact_shrinks_the_file_in_slices_between_which_others_write(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quick_path / "store.db"
    store = SqliteLightningStore(path)
    await fill_and_delete(store)
    await store.enqueue_rollout("kept")
    await store.close()
    assert path.stat().st_size > 15_000_000
    monkeypatch.setattr("agentlightning_plugins.stores.http.command._SHOWN_BYTES", 1_000_000)
    store, pages = SqliteLightningStore(path), []
    with closing(sqlite3.connect(path)) as connection:
        async for _ in store.compact():
            pages += connection.execute("PRAGMA page_count").fetchone()
            await store.enqueue_rollout("written meanwhile")
            if len(pages) == 4:
                break
    await store.close()
    assert pages == sorted(pages, reverse=True)
    assert 0 < pages[0] - pages[1] <= 300
    result = await asyncio.to_thread(CliRunner().invoke, command, ["compact", f"sqlite:///{path}"])
    assert result.exit_code == 0, result.output
    assert "MB so far" in result.output
    assert re.search(r"1\d\.\d MB before, 0\.\d MB now", result.output)
    assert path.stat().st_size < 1_000_000
    store = SqliteLightningStore(path)
    inputs = [rollout.input for rollout in await store.query_rollouts()]
    assert inputs == ["kept", *["written meanwhile"] * 4]
    await store.close()


def test_compact_reports_a_missing_file_and_a_store_that_needs_no_compacting(quick_path: Path) -> None:
    missing = CliRunner().invoke(command, ["compact", f"sqlite:///{quick_path}/none.db"])
    assert isinstance(missing.exception, ConfigError)
    assert "there is no file" in str(missing.exception)
    memory = CliRunner().invoke(command, ["compact", "memory://"])
    assert "needs no compacting" in str(memory.exception)
