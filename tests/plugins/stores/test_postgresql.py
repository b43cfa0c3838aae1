"""The PostgreSQL store: conformance, server faults, several processes, errors, the schema and the cost of calls."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import asyncpg
import pytest

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event, RolloutEnqueued
from agentlightning.store import Retention
from agentlightning.store.backend import Guard, Put, Query
from agentlightning.testing.store import DurableStoreConformance, primitives
from agentlightning.testing.store.model import Reopen
from agentlightning.types import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig, Run, Span
from agentlightning_plugins.stores.http.server import metrics as server_metrics
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.metrics import ServerMetrics
from agentlightning_plugins.stores.http.server.polling import Polls
from agentlightning_plugins.stores.postgresql import connection as connection_module
from agentlightning_plugins.stores.postgresql import schema, transaction, writer
from agentlightning_plugins.stores.postgresql.store import PostgresBackend, PostgresLightningStore
from agentlightning_plugins.stores.shared.sql import batch
from agentlightning_plugins.stores.shared.sql.document import encode_events
from tests.failures import check_messages
from tests.plugins.stores.actions import claim, finish, make_span, number_deleted
from tests.plugins.stores.queueing import QueueingTests
from tests.plugins.stores.reading import ReadingTests
from tests.plugins.stores.semantics import DurableSemantics
from tests.plugins.stores.waiting import WaitingTests
from tests.postgresql import PostgresServer
from tests.source import REPO
from tests.waiting import LIMIT_S, until


class TestPostgresLightningStore(QueueingTests, WaitingTests, ReadingTests, DurableStoreConformance):
    """Tests of what statements of SQL decide; memory and SQLite show what the engine decides on any backend."""

    test_a_succeeded_rollout_is_final = DurableSemantics.test_a_succeeded_rollout_is_final
    test_a_silent_attempt_is_given_to_another_worker = DurableSemantics.test_a_silent_attempt_is_given_to_another_worker
    test_a_deadline_is_enforced_after_reopening = DurableSemantics.test_a_deadline_is_enforced_after_reopening
    test_open_runs = DurableSemantics.test_open_runs_are_those_with_queued_or_running_rollouts
    test_rollouts_are_deleted = DurableSemantics.test_rollouts_are_deleted_by_age_count_and_status

    @pytest.fixture
    async def opened(self) -> AsyncIterator[list[PostgresLightningStore]]:
        """The stores that the test has opened; the last one is open."""
        stores: list[PostgresLightningStore] = []
        yield stores
        await stores[-1].close()

    @pytest.fixture
    async def store(self, database: str, opened: list[PostgresLightningStore]) -> PostgresLightningStore:
        opened.append(PostgresLightningStore(database, watchdog_interval_s=0.05))
        return opened[-1]

    @pytest.fixture
    def reopen(self, database: str, opened: list[PostgresLightningStore]) -> Reopen:
        async def reopen() -> PostgresLightningStore:
            await opened[-1].close()
            opened.append(PostgresLightningStore(database, watchdog_interval_s=0.05))
            return opened[-1]

        return reopen


SOON_S = LIMIT_S
TERMINATE = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname <> ''"
)


def backend_of(store: PostgresLightningStore) -> PostgresBackend:
    backend = store._database.backend
    assert isinstance(backend, PostgresBackend)
    return backend


async def write(store: PostgresLightningStore) -> None:
    """Writes without reading first."""
    await backend_of(store).commit([Put(Run(run_id="another"))])


def count_connects(store: PostgresLightningStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets an item for each connection that the store opens from now on."""
    server = backend_of(store)._thread.server
    connects: list[int] = []
    connect = server.connect

    async def counted(limit_s: float) -> asyncpg.Connection:
        connects.append(1)
        return await connect(limit_s)

    monkeypatch.setattr(server, "connect", counted)
    return connects


async def drop_connections(server: PostgresServer, store: PostgresLightningStore) -> None:
    """Ends a store's connections, and waits until it has opened a new one for writing and one for reading."""
    server.run_sql(TERMINATE)
    await until_answered(lambda: write(store))
    await until_answered(lambda: store.query_rollouts())


async def until_answered(call: Callable[[], Awaitable[object]]) -> None:
    """Repeats a call that a slow machine may not answer within the short limits of the test."""

    async def is_answered() -> bool:
        with contextlib.suppress(StoreError):
            await call()
            return True
        return False

    await until(is_answered)


# --- the server's faults ---


async def test_a_killed_server_loses_nothing_that_was_acknowledged(own_server: PostgresServer) -> None:
    store = PostgresLightningStore(own_server.url(), reconnect_s=LIMIT_S)
    acknowledged: list[tuple[str, str, str]] = []
    is_over = False

    async def work(number: int) -> None:
        while not is_over:
            queued = await store.enqueue_rollout({"worker": number})
            begun = await store.start_rollout("started")
            (span,) = await store.add_many_spans([make_span(begun)])
            await finish(store, begun)
            acknowledged.append((queued.rollout_id, begun.rollout_id, span.span_id))

    workers = [asyncio.create_task(work(number)) for number in range(8)]
    for kills in range(1, 4):
        await until(lambda kills=kills: len(acknowledged) >= 30 * kills)
        own_server.kill()
        await asyncio.to_thread(own_server.start)
    is_over = True
    await asyncio.gather(*workers)  # no caller got an error: the store waited for the server
    await store.close()
    store = PostgresLightningStore(own_server.url())
    statuses = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
    spans = Counter((span.rollout_id, span.span_id) for span in await store.query_spans(None))
    for queued_id, begun_id, span_id in acknowledged:
        assert (statuses[queued_id], statuses[begun_id]) == ("queuing", "succeeded")
        assert spans[begun_id, span_id] == 1
    # Nothing was written twice either: a write that was repeated after a lost answer was recognised.
    assert len(statuses) == 2 * len(acknowledged)
    assert len(spans) == len(acknowledged)
    counted = await store.statistics()
    assert (counted["rollouts"], counted["spans"]) == (len(statuses), len(spans))
    await store.close()


async def test_no_rollout_is_claimed_twice_when_the_server_is_killed(own_server: PostgresServer) -> None:
    store = PostgresLightningStore(own_server.url(), reconnect_s=LIMIT_S)
    queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(300)])
    claims: list[str] = []

    async def claim_all() -> None:
        while (claimed := await store.dequeue_rollout("worker")) is not None:
            claims.append(claimed.rollout_id)

    workers = [asyncio.create_task(claim_all()) for _ in range(4)]
    await until(lambda: len(claims) >= 50)
    own_server.kill()
    await asyncio.to_thread(own_server.start)
    await asyncio.gather(*workers)
    assert sorted(claims) == sorted(rollout.rollout_id for rollout in queued)
    assert (await store.statistics())["attempts"] == len(queued)
    await store.close()


async def test_a_server_that_does_not_come_back_is_reported(own_server: PostgresServer) -> None:
    store = PostgresLightningStore(own_server.tcp_url(), reconnect_s=0.5)
    await store.enqueue_rollout("kept")
    own_server.kill()
    for call in (lambda: store.enqueue_rollout("lost"), lambda: store.query_rollouts()):
        with pytest.raises(StoreError) as caught:
            await call()
        check_messages("PostgreSQL stays away", str(caught.value))
        assert "of-the-tests" not in str(caught.value)
    own_server.start()
    assert [rollout.input for rollout in await store.query_rollouts()] == ["kept"]
    await store.enqueue_rollout("later")
    await store.close()


async def test_a_schema_check_that_fails_does_not_end_the_writer(own_server: PostgresServer) -> None:
    store = PostgresLightningStore(own_server.tcp_url(), reconnect_s=0.3)
    await store.enqueue_rollout("kept")
    backend_of(store)._thread.writer._must_check_schema = True  # as when the server goes away twice in a row
    own_server.kill()
    with pytest.raises(StoreError, match="did not come back"):
        await asyncio.wait_for(write(store), SOON_S)
    own_server.start()
    await asyncio.wait_for(store.enqueue_rollout("later"), SOON_S)
    assert [rollout.input for rollout in await store.query_rollouts()] == ["kept", "later"]
    await store.close()


@pytest.fixture
def app_url(own_server: PostgresServer) -> Iterator[str]:
    """The database for a user of its own, named app, with the password "one"."""
    own_server.run_sql("CREATE ROLE app SUPERUSER LOGIN PASSWORD 'one'")
    yield own_server.tcp_url().replace("postgres:of-the-tests", "app:one")
    own_server.run_sql("SET client_min_messages = warning; DROP OWNED BY app CASCADE; DROP ROLE app")


@pytest.mark.parametrize("must_check", [False, True])
async def test_a_changed_password_is_reported_until_it_is_changed_back(
    own_server: PostgresServer, app_url: str, must_check: bool
) -> None:
    store = PostgresLightningStore(app_url)
    await store.enqueue_rollout("kept")
    # Two calls: psql runs the statements of one call in one transaction, and the store could connect before its commit.
    own_server.run_sql("ALTER ROLE app PASSWORD 'two'")
    own_server.run_sql("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'app'")
    backend_of(store)._thread.writer._must_check_schema = must_check
    for call in (lambda: write(store), lambda: store.query_rollouts()):
        with pytest.raises(ConfigError, match="refuses this user or password"):
            await asyncio.wait_for(call(), SOON_S)
    own_server.run_sql("ALTER ROLE app PASSWORD 'one'")
    await asyncio.wait_for(store.enqueue_rollout("later"), SOON_S)
    assert [rollout.input for rollout in await store.query_rollouts()] == ["kept", "later"]
    await store.close()


async def test_calls_fail_when_the_server_no_longer_answers(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.2)
    store = PostgresLightningStore(own_server.tcp_url(), watchdog_interval_s=None)
    await store.enqueue_rollout("kept")
    monkeypatch.setattr(connection_module, "ANSWER_SLACK_S", 0.1)
    server = backend_of(store)._thread.server
    server._statement_timeout_s = server._connect_timeout_s = server.reconnect_s = 0.3
    await drop_connections(own_server, store)
    with own_server.frozen():
        for during in (0, 2 * writer.LOOK_EVERY_S):  # also while the writer waits for the answer to its poll for events
            await asyncio.sleep(during)
            calls = asyncio.gather(store.query_rollouts(), write(store), return_exceptions=True)
            answers = await asyncio.wait_for(calls, SOON_S)
            assert [type(answer) for answer in answers] == [StoreError, StoreError]
    await until_answered(lambda: store.query_rollouts())
    await until_answered(lambda: write(store))
    await store.close()


async def test_a_read_only_standby_is_reported_without_a_storm_of_connections(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresLightningStore(own_server.tcp_url(), reconnect_s=0.5, watchdog_interval_s=None)
    await store.enqueue_rollout("kept")
    with own_server.as_standby():
        connects = count_connects(store, monkeypatch)
        for _ in range(2):
            with pytest.raises(StoreError, match="read-only"):
                await asyncio.wait_for(write(store), SOON_S)
        assert [rollout.input for rollout in await store.query_rollouts()] == ["kept"]
        assert len(connects) < 20
    await store.enqueue_rollout("later")
    await store.close()


@pytest.mark.parametrize("is_answer_lost", [False, True])
@pytest.mark.parametrize("text", ["BEGIN", "COMMIT", "SELECT pg_notify"])
async def test_a_connection_that_asyncpg_lost_track_of_is_replaced(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, text: str, is_answer_lost: bool
) -> None:
    store = PostgresLightningStore(own_server.tcp_url(), watchdog_interval_s=None)
    await store.enqueue_rollout("first")
    plain, failures = asyncpg.Connection.execute, [asyncpg.InternalClientError("cannot switch to state 12")]

    async def fail_once(connection: asyncpg.Connection, query: str, *arguments: Any, **options: Any) -> Any:
        if failures and query.startswith(text):
            if is_answer_lost:
                await plain(connection, query, *arguments, **options)
            raise failures.pop()
        return await plain(connection, query, *arguments, **options)

    monkeypatch.setattr(asyncpg.Connection, "execute", fail_once)
    for task in ("second", "third"):
        await asyncio.wait_for(store.enqueue_rollout(task), SOON_S)
    assert failures == []
    assert (await store.query_rollouts()).total == 3
    await store.close()


async def test_a_writer_that_reconnects_to_a_restored_database_stores_the_shared_parts_of_spans_again(
    database: str,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = PostgresLightningStore(database)
        stack.push_async_callback(store.close)
        claimed = await store.start_rollout("a")
        await store.add_span(make_span(claimed, text="text " * 1000))
        other = await asyncpg.connect(database)
        stack.push_async_callback(other.close)
        await other.execute("DELETE FROM agl.span; DELETE FROM agl.part")
        await other.execute(f"{TERMINATE} AND datname = current_database()")
        await until_answered(lambda: store.add_span(make_span(claimed, text="text " * 1000 + "more " * 1000)))
        (found,) = await store.query_spans(claimed.rollout_id)
        assert found.attributes["text"] == "text " * 1000 + "more " * 1000
        assert await other.fetchval("SELECT count(*) FROM agl.part") == 1


async def test_a_write_waits_until_a_standby_is_promoted(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [
        PostgresLightningStore(own_server.tcp_url() + query, reconnect_s=LIMIT_S, watchdog_interval_s=None)
        for query in ("", "?target_session_attrs=read-write")
    ]
    with own_server.as_standby():
        connects = [count_connects(store, monkeypatch) for store in stores]
        writing = [asyncio.create_task(write(store)) for store in stores]
        await until(lambda: min(map(len, connects)) >= 4)
        assert not any(task.done() for task in writing)
    await asyncio.wait_for(asyncio.gather(*writing), SOON_S)
    for store in stores:
        await store.close()


async def test_a_write_fails_when_the_server_drops_every_new_connection(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresLightningStore(own_server.tcp_url(), reconnect_s=0.5, watchdog_interval_s=None)
    await store.enqueue_rollout("kept")
    connects = count_connects(store, monkeypatch)
    with monkeypatch.context() as during:
        during.setattr(writer, "SLOT", "SELECT pg_terminate_backend(pg_backend_pid())")
        own_server.run_sql(TERMINATE)
        with pytest.raises(StoreError, match="did not come back"):
            await asyncio.wait_for(write(store), SOON_S)
        assert len(connects) < 20
    await store.enqueue_rollout("later")
    await store.close()


async def test_a_statement_that_the_server_never_answers_fails(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_server.tcp_url()
    store = PostgresLightningStore(url, statement_timeout_s=10.0, reconnect_s=0.3, watchdog_interval_s=None)
    await store.enqueue_rollout("kept")
    with monkeypatch.context() as during:
        during.setattr(connection_module, "ANSWER_SLACK_S", -9.8)  # leaves 0.2 s of the statement timeout's 10 s
        await drop_connections(own_server, store)
        other = await asyncpg.connect(own_server.url())
        async with other.transaction():
            await other.execute("LOCK TABLE agl.rollout, agl.run")
            for call in (lambda: write(store), lambda: store.query_rollouts()):
                with pytest.raises(StoreError, match="did not come back"):
                    await asyncio.wait_for(call(), SOON_S)
    await other.close()
    await until_answered(lambda: write(store))
    await until_answered(lambda: store.query_rollouts())
    await store.close()


async def test_a_read_waits_while_the_server_has_no_free_connection(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresLightningStore(own_server.url(), reconnect_s=LIMIT_S, watchdog_interval_s=None)
    held: list[asyncpg.Connection] = []
    refusals = 0
    while refusals < 5:  # also takes connections that other clients are returning
        try:
            held.append(await asyncpg.connect(own_server.url()))
        except asyncpg.TooManyConnectionsError:
            refusals += 1
            await asyncio.sleep(0.02)
    connects = count_connects(store, monkeypatch)
    reading = asyncio.create_task(store.query_rollouts())  # opens another connection
    await until(lambda: len(connects) >= 3)
    was_waiting = not reading.done()
    for connection in held:
        await connection.close()
    assert was_waiting
    assert len(await reading) == 0
    await store.close()


async def test_cancelled_statements_are_executed_again(database: str) -> None:
    url = f"{database}{'&' if '?' in database else '?'}agl_connections=2"
    store = PostgresLightningStore(url, lease_s=LIMIT_S)  # no rollout is claimed again, however long this takes
    other = await asyncpg.connect(database)
    cancel = (
        "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE application_name = 'lightning' "
        "AND datname = current_database() AND state = 'active'"
    )
    number = hits = 0

    async def cancel_once_in_each_round() -> None:  # a statement that is cancelled three times fails
        nonlocal hits
        hit_in = -1
        while hits < 8:
            if hit_in != number and await other.fetchval(cancel):
                hit_in, hits = number, hits + 1
            await asyncio.sleep(0)

    cancelling = asyncio.create_task(cancel_once_in_each_round())
    while not cancelling.done():
        number += 1
        await store.enqueue_rollout(number)
        claimed = await store.dequeue_rollout()
        assert claimed is not None
        assert claimed.input == number
        await store.query_rollouts(limit=5)
    await cancelling
    await other.close()
    await store.close()


async def test_a_connection_whose_transaction_began_although_its_begin_was_cancelled_is_not_used_again(
    database: str,
) -> None:
    store = PostgresLightningStore(database, watchdog_interval_s=None)
    tries: list[bool] = []

    async def read(connection: asyncpg.Connection) -> None:
        tries.append(connection.is_in_transaction())
        if len(tries) == 1:
            await connection.execute("BEGIN")
            raise asyncpg.QueryCanceledError("canceling statement due to user request")

    await backend_of(store)._thread.reads.submit(read)
    assert tries == [False, False]
    assert await store.query_rollouts(limit=5) is not None
    await store.close()


async def test_a_statement_that_timed_out_is_not_executed_again(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PostgresLightningStore(database, statement_timeout_s=0.2, watchdog_interval_s=None)
    await store.enqueue_rollout("kept")
    begun: Counter[str] = Counter()

    def count(plain: Any) -> Any:
        def counted(connection: asyncpg.Connection, query: str, *arguments: Any, **options: Any) -> Any:
            begun[query.split()[0]] += 1
            return plain(connection, query, *arguments, **options)

        return counted

    for name in ("fetch", "execute"):
        monkeypatch.setattr(asyncpg.Connection, name, count(getattr(asyncpg.Connection, name)))
    other = await asyncpg.connect(database)
    async with other.transaction():
        await other.execute("LOCK TABLE agl.rollout, agl.run")
        begun.clear()
        with pytest.raises(StoreError, match="the search took too long and was stopped; search one run"):
            await store.query_rollouts()
        assert begun == {"SELECT": 1}
        begun.clear()
        failed = await asyncio.gather(*(write(store) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in failed] == [StoreError] * 3
        assert "at its timeout" in str(failed[0])
        assert begun["BEGIN"] == 1
    assert [rollout.input for rollout in await store.query_rollouts()] == ["kept"]
    await other.close()
    await store.close()


@pytest.mark.parametrize(
    "setting", ["agl_connections=1", "agl_connections=many", "agl_connections=nan", "agl_connections=inf", "agl_pool=3"]
)
def test_an_invalid_setting_in_the_url_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="connections"):
        PostgresLightningStore(f"postgresql://user@localhost:1/db?application_name=mine&{setting}")


async def test_an_outage_logs_one_line_when_it_begins_and_one_when_it_ends(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.05)
    caplog.set_level("WARNING", "agentlightning")
    store = PostgresLightningStore(own_server.url(), reconnect_s=0.3, watchdog_interval_s=0.05)
    await claim(store)
    own_server.kill()
    connects = count_connects(store, monkeypatch)
    for _ in range(2):
        with pytest.raises(StoreError):
            await store.enqueue_rollout("task")
    before = len(connects)
    await until(lambda: len(connects) >= before + 10)  # meanwhile, watchdog scans and polls for events fail
    await asyncio.to_thread(own_server.start)
    await until_answered(lambda: store.enqueue_rollout("task"))
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2, lines
    check_messages("PostgreSQL is killed", *lines)
    assert "of-the-tests" not in caplog.text
    await store.close()


async def test_a_waiter_gets_an_event_after_the_server_restarts(own_server: PostgresServer) -> None:
    here = PostgresLightningStore(own_server.url(), reconnect_s=LIMIT_S)
    waiting = asyncio.create_task(here.dequeue_rollout(timeout=LIMIT_S))
    await asyncio.sleep(0.1)
    own_server.kill()
    own_server.start()
    there = PostgresLightningStore(own_server.url())
    queued = await there.enqueue_rollout("after the restart")
    claimed = await asyncio.wait_for(waiting, SOON_S)
    assert claimed is not None
    assert claimed.rollout_id == queued.rollout_id
    await here.close()
    await there.close()


@contextlib.asynccontextmanager
async def hold_rollout(url: str, rollout_id: str) -> AsyncIterator[asyncpg.Connection]:
    """Another program's transaction that has locked the rollout's row and stays open."""
    holder = await asyncpg.connect(url)
    try:
        await holder.execute("BEGIN")
        await holder.fetchrow("SELECT * FROM agl.rollout WHERE rollout_id = $1 FOR UPDATE", rollout_id)
        yield holder
    finally:
        holder.terminate()


async def test_a_locked_rollout_delays_only_writes_to_this_rollout(database: str) -> None:
    store, other = PostgresLightningStore(database), PostgresLightningStore(database)
    locked, free = await claim(store), await claim(store)
    waiting = asyncio.create_task(other.wait_for_rollouts([free.rollout_id], timeout=LIMIT_S))
    async with hold_rollout(database, locked.rollout_id) as holder:
        late = asyncio.create_task(finish(store, locked))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(finish(store, free), SOON_S)  # in the same store
        assert [rollout.status for rollout in await asyncio.wait_for(waiting, SOON_S)] == ["succeeded"]
        await asyncio.wait_for(claim(other), SOON_S)  # in another store
        assert not late.done()
        await holder.execute("ROLLBACK")
        await asyncio.wait_for(late, SOON_S)
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded", "preparing"}
    for each in (store, other):
        await each.close()


async def test_a_locked_rollout_in_the_queue_is_skipped(database: str) -> None:
    store = PostgresLightningStore(database)
    first, second = await store.enqueue_rollout(1), await store.enqueue_rollout(2)
    async with hold_rollout(database, first.rollout_id) as holder:
        claimed = await asyncio.wait_for(store.dequeue_rollout(), SOON_S)
        assert claimed is not None
        assert claimed.rollout_id == second.rollout_id
        await holder.execute("ROLLBACK")
        freed = await store.dequeue_rollout()
        assert freed is not None
        assert freed.rollout_id == first.rollout_id
    await store.close()


async def test_a_claim_does_not_overlook_a_rollout_that_is_locked_for_a_moment(database: str) -> None:
    """Another process may lock it only to find that a guard fails, and no event follows."""
    store = PostgresLightningStore(database)
    queued = await store.enqueue_rollout(1)
    async with hold_rollout(database, queued.rollout_id) as holder:
        claiming = asyncio.create_task(store.dequeue_rollout())
        await asyncio.sleep(0.1)
        assert not claiming.done()
        await holder.execute("ROLLBACK")
        claimed = await asyncio.wait_for(claiming, SOON_S)
    assert claimed is not None
    assert claimed.rollout_id == queued.rollout_id
    await store.close()


async def test_each_operation_of_a_transaction_that_fails_is_done_once(database: str) -> None:
    store = PostgresLightningStore(database)
    backend = backend_of(store)
    one = Rollout(rollout_id="ro-1", input=1, start_time=0.0)
    outcomes = await asyncio.gather(
        backend.commit([Put(one)]),
        backend.commit([Put(one.model_copy(update={"input": 2}))]),
        backend.commit([Put(one.model_copy(update={"rollout_id": "ro-" + "x" * 9_000_000}))]),  # too long for an index
        backend.commit([Put(one.model_copy(update={"rollout_id": "ro-2"}))], [Guard(Rollout, ("ro-2",), 7)]),
        return_exceptions=True,
    )
    assert outcomes[:2] == [True, True]
    assert isinstance(outcomes[2], StoreError)
    assert outcomes[3] is False
    (row,) = (await backend.select(Query(Rollout))).rows
    assert (row.record.input, row.revision) == (2, 2)
    await store.close()


STOPPED = """
import asyncio, sys
from tests.plugins.stores.actions import claim, finish, make_span
from agentlightning_plugins.stores.postgresql import writer
import agentlightning as agl

writer.SETTINGS["idle_in_transaction_session_timeout"] = "0"

async def work(store):
    while True:
        claimed = await claim(store)
        await store.add_many_spans([make_span(claimed)])
        await finish(store, claimed)

async def main():
    store = agl.create_store(sys.argv[1], run="of-the-stopped")
    print("ready", flush=True)
    await asyncio.gather(*(work(store) for _ in range(8)))

asyncio.run(main())
"""


async def test_other_processes_read_and_write_while_a_process_is_suspended(database: str) -> None:
    """The process is suspended at varying points; a lock that it held would be kept until it continues."""
    stores = [PostgresLightningStore(database) for _ in range(2)]
    process = start_process(STOPPED, database)
    try:
        for stop in range(20):
            await asyncio.sleep(0.005 + 0.0013 * stop)
            process.send_signal(signal.SIGSTOP)
            for store, other in (stores, stores[::-1]):
                claimed = await claim(store)
                waiting = asyncio.create_task(other.wait_for_rollouts([claimed.rollout_id]))
                await asyncio.wait_for(finish(store, claimed), SOON_S)
                await asyncio.wait_for(waiting, SOON_S)
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()
    for store in stores:
        await store.close()


HOLDING = """
import asyncio, sys
from agentlightning_plugins.stores.postgresql.transaction import Transaction
import agentlightning as agl

async def stop(transaction):
    print("ready", flush=True)
    sys.stdin.read()

async def main():
    store = agl.create_store(sys.argv[1])
    Transaction.write = stop
    await store.update_attempt(sys.argv[2], "latest", status="failed")

asyncio.run(main())
"""


async def test_a_process_that_is_suspended_in_a_transaction_keeps_its_locks_for_two_seconds(database: str) -> None:
    store = PostgresLightningStore(database)
    claimed, other = await claim(store), await claim(store)
    process = start_process(HOLDING, database, claimed.rollout_id)
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.wait_for(finish(store, other), SOON_S)
        finishing = asyncio.create_task(finish(store, claimed))
        await asyncio.sleep(0.1)
        assert not finishing.done()
        await asyncio.wait_for(finishing, SOON_S)
    finally:
        process.kill()
        process.communicate()
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}
    await store.close()


async def test_no_event_is_skipped_when_transactions_commit_out_of_order(database: str) -> None:
    store = PostgresLightningStore(database)
    heard: list[str] = []
    backend_of(store).watch(lambda events: heard.extend(getattr(event, "rollout_id", "") for event in events))
    writers = [await asyncpg.connect(database) for _ in range(3)]
    for number, connection in enumerate(writers):  # transaction ids and positions in the order 0, 1, 2
        await connection.execute("BEGIN")
        text = encode_events([RolloutEnqueued(rollout_id=f"ro-{number}")])
        await connection.execute(
            "INSERT INTO agl.event (xid, origin, events) VALUES (pg_current_xact_id()::text::bigint, $1, $2)",
            number,
            text,
        )
    for number in (2, 0, 1):  # commits in the order 2, 0, 1
        await writers[number].execute("SELECT pg_notify('agl', '')")
        await writers[number].execute("COMMIT")
        await until(lambda number=number: f"ro-{number}" in heard)
        await store.enqueue_rollout(number)  # reads events too
    assert [rollout_id for rollout_id in heard if len(rollout_id) == 4] == ["ro-2", "ro-0", "ro-1"]
    for connection in writers:
        await connection.close()
    await store.close()


async def test_two_stores_get_every_event_of_each_other_once(database: str) -> None:
    stores = [PostgresLightningStore(database) for _ in range(2)]
    heard: list[list[str]] = [[], []]
    for store, mine in zip(stores, heard, strict=True):

        def listen(events: Sequence[Event], mine: list[str] = mine) -> None:
            mine.extend(getattr(event, "rollout_id", "") for event in events)

        backend_of(store).watch(listen)
    for number in range(30):
        await asyncio.gather(*(store.enqueue_rollout(number) for store in stores for _ in range(3)))
    await until(lambda: min(map(len, heard)) >= 180)
    stored = Counter(rollout.rollout_id for rollout in await stores[0].query_rollouts())
    assert Counter(heard[0]) == Counter(heard[1]) == stored
    for store in stores:
        await store.close()


async def test_cancelling_rollouts_that_another_store_is_claiming_causes_no_deadlock(database: str) -> None:
    stores = [PostgresLightningStore(database) for _ in range(3)]
    for _ in range(15):
        queued = await stores[0].enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(6)])
        await asyncio.gather(
            stores[1].dequeue_many_rollouts(limit=6, worker_id="worker"),
            *(stores[2].cancel_rollout(rollout.rollout_id) for rollout in queued),
        )
    connection = await asyncpg.connect(database)
    assert await connection.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
    await connection.close()
    assert {rollout.status for rollout in await stores[0].query_rollouts()} == {"cancelled"}
    for store in stores:
        await store.close()


# --- several processes ---


def start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=REPO, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


async def test_a_commit_of_another_store_wakes_a_waiter_that_does_not_poll(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``bench_store_server.py`` measures how soon."""
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 10 * LIMIT_S)
    here, there = PostgresLightningStore(database), PostgresLightningStore(database)
    for _ in range(5):
        claimed = await claim(here)
        waiting = asyncio.create_task(here.wait_for_rollouts([claimed.rollout_id]))
        await asyncio.sleep(0.02)
        await finish(there, claimed)
        await asyncio.wait_for(waiting, SOON_S)
    for store in (here, there):
        await store.close()


async def test_a_deadline_with_many_watchdogs_is_enforced_once(database: str) -> None:
    stores = [PostgresLightningStore(database, watchdog_interval_s=0.05) for _ in range(4)]
    events: list[Event] = []
    backend_of(stores[0]).watch(events.extend)
    config = RolloutConfig(timeout_seconds=0.2, max_attempts=2, retry_condition=["timeout"])
    queued = [await stores[0].enqueue_rollout(n, config=config) for n in range(6)]
    for _ in range(2):  # both attempts of each rollout time out
        for store, _rollout in zip(stores * 2, queued, strict=False):
            assert await store.dequeue_rollout(timeout=LIMIT_S) is not None
    ended = await asyncio.wait_for(stores[1].wait_for_rollouts([rollout.rollout_id for rollout in queued]), SOON_S)
    assert {rollout.status for rollout in ended} == {"failed"}
    for store in stores:
        await store._watchdog.scan(store.now())
        await store.add_metrics(1, {})  # an event after those of the watchdogs
    await until(lambda: [event.kind for event in events].count("step_finished") == len(stores))
    kinds = Counter(event.kind for event in events)
    assert (kinds["attempt_finished"], kinds["rollout_finished"]) == (12, 6)
    for rollout in queued:
        attempts = await stores[2].query_attempts(rollout.rollout_id)
        assert [attempt.status for attempt in attempts] == ["timeout", "timeout"]
    for store in stores:
        await store.close()


@pytest.mark.parametrize("writes_first", [False, True])
async def test_a_waiter_that_missed_events_reads_the_records(
    writes_first: bool, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch, "KEPT_EVENTS", 3)
    here, there = PostgresLightningStore(database), PostgresLightningStore(database)
    claimed = await claim(here)
    waiting = asyncio.create_task(here.wait_for_rollouts([claimed.rollout_id], timeout=LIMIT_S))
    await asyncio.sleep(0.05)
    sleeper = backend_of(here)._thread.writer
    look = sleeper._look

    async def sleep_on() -> None:
        sleeper._must_look = False

    monkeypatch.setattr(sleeper, "_look", sleep_on)
    await there.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    for number in range(140):
        await there.enqueue_rollout(number)
    assert not waiting.done()
    if writes_first:  # a write reads the events that are left
        await here.enqueue_rollout("own")
    monkeypatch.setattr(sleeper, "_look", look)
    await there.enqueue_rollout("one more")
    (done,) = await asyncio.wait_for(waiting, SOON_S)
    assert done.status == "succeeded"
    assert "missed events" in caplog.text
    await here.close()
    await there.close()


# --- errors ---


def test_a_wrong_password_is_reported_but_not_shown(postgresql_server: PostgresServer) -> None:
    with pytest.raises(ConfigError, match="user or password") as caught:
        PostgresLightningStore(postgresql_server.tcp_url(password="mistaken-secret"))
    assert "mistaken-secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_missing_database_is_reported(postgresql_server: PostgresServer) -> None:
    with pytest.raises(ConfigError, match="no such database; create it"):
        PostgresLightningStore(postgresql_server.url("nowhere"))


def test_an_unreachable_server_is_reported_without_the_password() -> None:
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        PostgresLightningStore("postgresql://me:hush-hush@127.0.0.1:1/db")
    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://me:hush-hush@host:port/db", "postgresql://[me:hush-hush@host/db"])
def test_a_malformed_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="postgresql://user:password@host:5432/database") as caught:
        PostgresLightningStore.from_url(url)
    assert "hush-hush" not in str(caught.value)


def test_a_token_is_refused(database: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        PostgresLightningStore.from_url(database, token="secret")


async def test_an_id_with_a_nul_character_is_refused_and_nothing_is_stored(database: str) -> None:
    store = PostgresLightningStore(database)
    await store.enqueue_rollout("a\0b")  # an input may have one
    with pytest.raises(ConfigError, match="cannot store"):
        await store.dequeue_rollout("worker\0")
    claimed = await store.dequeue_rollout("worker")
    assert claimed is not None
    assert claimed.input == "a\0b"
    await store.add_span(make_span(claimed, "name\0", text="\0"))
    (span,) = await store.query_spans(claimed.rollout_id, name="name\0")
    assert (span.name, span.attributes) == ("name\0", {"text": "\0"})
    assert len(await store.query_spans(claimed.rollout_id, name="name\ufffd")) == 0
    await store.close()


# --- the schema ---


async def migrate_as_newer_version(database: str, oldest_writer: int) -> None:
    """Migrates the database as the next version of Lightning would."""
    connection = await asyncpg.connect(database)
    async with connection.transaction():
        await connection.execute("ALTER TABLE agl.attempt ADD COLUMN news text")
        await connection.execute(
            "UPDATE agl.schema_version SET version = version + 1, oldest_writer = $1", oldest_writer
        )
        await connection.execute("SELECT pg_notify('agl', $1)", schema.MIGRATED)
    await connection.close()


async def test_processes_stop_writing_when_a_newer_version_changes_the_schema(database: str) -> None:
    store = PostgresLightningStore(database)
    await store.enqueue_rollout("kept")
    await migrate_as_newer_version(database, len(schema.MIGRATIONS) + 1)
    writer = backend_of(store)._thread.writer
    await until(lambda: writer.refusal is not None)
    with pytest.raises(ConfigError) as caught:
        await store.enqueue_rollout("too late")
    check_messages("a newer version has changed the schema", str(caught.value))
    with pytest.raises(ConfigError, match="newer version"):
        await store.dequeue_rollout("worker")
    assert [rollout.input for rollout in await store.query_rollouts()] == ["kept"]
    await store.close()
    with pytest.raises(ConfigError, match="newer version"):
        PostgresLightningStore(database)


async def test_two_successive_versions_share_a_database_during_an_upgrade_under_load(database: str) -> None:
    store = PostgresLightningStore(database)
    done: list[str] = []

    async def work(worker: str, until_done: int) -> None:
        while len(done) < until_done:
            await store.enqueue_rollout("of the old version")
            claimed = await store.dequeue_rollout(worker)
            if claimed is not None:
                await store.add_many_spans([make_span(claimed)])
                await finish(store, claimed)
                done.append(claimed.rollout_id)

    working = [asyncio.create_task(work(f"worker-{number}", 120)) for number in range(4)]
    await until(lambda: len(done) >= 40)
    await migrate_as_newer_version(database, len(schema.MIGRATIONS))
    assert len(done) < 120, "it was migrated under load"
    await asyncio.gather(*working)
    opened = PostgresLightningStore(database)
    assert await opened.enqueue_rollout("of the new version")
    found = await opened.query_rollouts(status_in=["succeeded"])
    assert sorted(rollout.rollout_id for rollout in found) == sorted(done)
    assert len(await opened.query_spans(None)) == len(done)
    for each in (store, opened):
        await each.close()


async def test_a_migration_is_applied_completely_or_not_at_all(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PostgresLightningStore(database)
    await store.enqueue_rollout("kept")
    await store.close()
    add = "ALTER TABLE agl.rollout ADD COLUMN color text"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, (add, "ALTER TABLE agl.nonsense RENAME TO n")))
    with pytest.raises(StoreError):
        PostgresLightningStore(database)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], (add, "UPDATE agl.rollout SET color = 'red'")))
    store = PostgresLightningStore(database)
    assert [rollout.input for rollout in await store.query_rollouts()] == ["kept"]
    await store.close()
    connection = await asyncpg.connect(database)
    assert await connection.fetchval("SELECT color FROM agl.rollout") == "red"
    assert await connection.fetchval("SELECT version FROM agl.schema_version") == len(schema.MIGRATIONS)
    await connection.close()


async def test_another_programs_schema_is_refused_and_left_unchanged(database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("CREATE SCHEMA agl")
    await connection.execute("CREATE TABLE agl.theirs (text text)")
    with pytest.raises(ConfigError, match="not ours"):
        PostgresLightningStore(database)
    assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'agl'") == 1
    await connection.close()


async def poll(store: PostgresLightningStore, cursor: str | None, limit: int = 1000) -> tuple[list[str], str | None]:
    """Returns the names of new spans, and the next cursor."""
    names: list[str] = []
    while page := await store.poll_new_spans(cursor, limit=limit):
        names += [span.name for span in page]
        cursor = page.cursor
    return names, page.cursor


@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_polling_waits_for_no_transaction_and_misses_no_span_that_is_committed_later(
    database: str, limit: int
) -> None:
    store = PostgresLightningStore(database)
    rollout = await store.start_rollout("task")
    await store.add_span(make_span(rollout, "first"))
    columns = "attempt, sequence_id, run_id, revision, record"
    slow = await asyncpg.connect(database)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(  # takes positions and a transaction now, and commits after "last", which has the next ones
        f"INSERT INTO agl.span (span_id, xid, {columns}) SELECT n, pg_current_xact_id()::text::bigint, {columns} "
        "FROM agl.span, (VALUES ('fe'), ('ff')) AS two (n)"
    )
    await store.add_span(make_span(rollout, "last"))
    names, cursor = await poll(store, None, limit)
    assert names == ["first", "last"]
    await store.add_span(make_span(rollout, "newer"))
    await transaction.commit()
    names, cursor = await poll(store, cursor, limit)
    assert names == ["first", "first", "newer"]
    assert await poll(store, cursor, limit) == ([], (await store.poll_new_spans(cursor)).cursor)
    with pytest.raises(ConfigError, match="cursor"):
        await store.poll_new_spans("0.0.0/[1]")
    await slow.close()
    await store.close()


async def test_polls_go_on_in_a_restored_database_whose_server_has_begun_with_smaller_transactions(
    database: str,
) -> None:
    store = PostgresLightningStore(database)
    rollout = await store.start_rollout("task")
    await store.add_span(make_span(rollout, "read before"))
    connection = await asyncpg.connect(database)
    await connection.execute("UPDATE agl.schema_version SET xid_offset = 5000000000")  # as if it had had so many
    await store.add_span(make_span(rollout, "of the old server"))
    names, cursor = await poll(store, None)
    assert names == ["read before", "of the old server"]
    await store.close()
    await connection.execute("UPDATE agl.schema_version SET xid_offset = 0")
    for number in range(2):  # nothing changes when it is opened again
        store = PostgresLightningStore(database)
        await store.add_span(make_span(rollout, f"new {number}"))
        names, cursor = await poll(store, cursor)
        assert names == [f"new {number}"]
        await store.close()
    assert 10**12 < await connection.fetchval("SELECT xid_offset FROM agl.schema_version") < 2 * 10**12
    await connection.close()


async def test_several_stores_can_set_up_a_new_database_at_the_same_time(database: str) -> None:
    stores = await asyncio.gather(*(asyncio.to_thread(PostgresLightningStore, database) for _ in range(5)))
    await asyncio.gather(*(store.enqueue_rollout(number) for number, store in enumerate(stores)))
    assert len(await stores[0].query_rollouts()) == 5
    for store in stores:
        await store.close()


# --- planted bugs ---

HANDS_OUT_TWICE = "test_a_claimed_rollout_is_never_handed_out_twice"
PLANTED = [
    ("CASE n.queue_position WHEN 0", "CASE 0 WHEN n.queue_position THEN 1 WHEN 0", HANDS_OUT_TWICE),
    ("r.priority DESC", "r.priority", "test_the_highest_priority_is_claimed_first_also_after_a_retry"),
    ("DESC, r.queue_position", "DESC, -r.position", "test_rollouts_are_claimed_in_the_order_they_were_enqueued"),
    ("r.run_id = $1", "r.run_id <> $1 || ' '", "test_every_run_has_a_queue_of_its_own"),
    ("held.revision", "0 * held.revision", "test_concurrently_published_versions_are_kept"),
    ("s.span_id = n.id", "s.span_id = n.id || ' '", "test_a_span_that_is_stored_is_not_stored_again"),
    ("WHERE t.position = n.position", "WHERE t.position = -n.position", "test_a_succeeded_rollout_is_final"),
]


def plant(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    """Puts a bug in the statements."""
    found = 0
    for name in ("CANDIDATES", "SPANS"):
        found += getattr(transaction, name).count(right)
        monkeypatch.setattr(transaction, name, getattr(transaction, name).replace(right, wrong))
    for statements in (transaction.LOCK, transaction.INSERT, transaction.UPDATE):
        for kind, statement in statements.items():
            found += statement.count(right)
            monkeypatch.setitem(statements, kind, statement.replace(right, wrong))
    assert found


@pytest.mark.parametrize(("right", "wrong", "named_test"), PLANTED, ids=[test for _, _, test in PLANTED])
async def test_a_bug_planted_in_the_sql_statements_fails_its_conformance_test(
    database: str, right: str, wrong: str, named_test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "PATIENCE_S", 0.5)
    monkeypatch.setattr(writer, "_MAX_LOCKED_S", 0.5)
    plant(monkeypatch, right, wrong)
    store = PostgresLightningStore(database)
    try:
        with pytest.raises((AssertionError, StoreError, TimeoutError, pytest.fail.Exception)):
            await getattr(TestPostgresLightningStore(), named_test)(store)
    finally:
        await store.close()


@pytest.mark.parametrize(
    "named_test",
    [test_a_locked_rollout_delays_only_writes_to_this_rollout, test_a_locked_rollout_in_the_queue_is_skipped],
)
async def test_a_statement_that_waits_for_locks_fails_the_tests_of_locked_rollouts(
    database: str, named_test: Callable[[str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "FOR UPDATE SKIP LOCKED", "FOR UPDATE")
    monkeypatch.setattr(sys.modules[__name__], "SOON_S", 0.5)
    with pytest.raises(TimeoutError):
        await named_test(database)


async def test_without_a_notification_events_are_read_regularly(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.1)
    here, there = PostgresLightningStore(database), PostgresLightningStore(database)
    notify = writer.Writer._notify
    monkeypatch.setattr(writer.Writer, "_notify", lambda self: asyncio.sleep(0))
    waiting = asyncio.create_task(here.dequeue_rollout(timeout=LIMIT_S))
    await asyncio.sleep(0.05)
    await there.enqueue_rollout("of a process that was killed before its NOTIFY")
    assert await waiting is not None
    monkeypatch.setattr(writer.Writer, "_notify", notify)
    for store in (here, there):
        await store.close()


# --- cost ---


async def test_operations_cost_the_same_with_few_and_many_stored_rollouts(
    make_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the pages that PostgreSQL touches, which do not depend on the load of the computer."""
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 10 * LIMIT_S)
    monkeypatch.setattr(server_metrics, "ANSWER_S", LIMIT_S)  # a scrape does not go on during the next operation
    touched = {stored: await count_pages(make_database(), stored) for stored in (200, 3000)}
    for name, few in touched[200].items():
        many = touched[3000][name]
        assert many < 1.5 * few + 20, f"{name}: {few} pages with 200 rollouts, {many} with 3,000"


async def fill(backend: PostgresBackend, stored: int) -> None:
    """Stores finished rollouts with one attempt and one span each."""
    for start in range(0, stored, 2000):
        numbers = range(start, min(start + 2000, stored))
        writes: list[Put] = []
        for n in numbers:
            metadata = {"group": n // 4, "task_id": f"t{n}", "step": n // 64}
            rollout = Rollout(rollout_id=f"old-{n}", input=n, start_time=0.0, status="succeeded", metadata=metadata)
            attempt = Attempt(rollout_id=f"old-{n}", attempt_id="at", sequence_id=1, start_time=0.0, status="succeeded")
            writes += [Put(rollout), Put(attempt)]
        await backend.commit(writes)
        spans = [Span.from_attributes(attributes={}, rollout_id=f"old-{n}", attempt_id="at") for n in numbers]
        await backend.append_spans(spans, 1.0)


async def count_pages(url: str, stored: int) -> dict[str, int]:
    store = PostgresLightningStore(url, watchdog_interval_s=None)
    await fill(backend_of(store), stored)
    meter = await asyncpg.connect(url)
    await vacuum(meter)
    claimed = await claim(store)
    metrics = ServerMetrics(store, Polls(), EventStreams(store.with_run))
    keep_all = Retention(max_age_s=9.0, max_rollouts=10**6)
    operations: dict[str, Callable[[], Awaitable[object]]] = {
        "enqueue and claim": lambda: claim(store),
        "append": lambda: store.add_many_spans([make_span(claimed) for _ in range(3)]),
        "wait": lambda: store.wait_for_rollouts([claimed.rollout_id], timeout=0),
        "get": lambda: store.get_rollout_by_id(claimed.rollout_id),
        "attempts": lambda: store.query_attempts(claimed.rollout_id),
        "spans": lambda: store.query_spans("old-3"),
        "many": lambda: asyncio.gather(*(store.query_spans(f"old-{n}") for n in range(20))),
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
    for operation in operations.values():  # the first execution plans the statements, which reads the catalogue
        await operation()
    pages: dict[str, int] = {}
    for _ in range(3):  # a connection may count pages of an operation later, with those of another
        claimed = await claim(store)
        for name, operation in operations.items():
            before = await read_meter(meter, store)
            await operation()
            touched = await read_meter(meter, store) - before
            pages[name] = min(pages.get(name, touched), touched)
    await meter.close()
    await store.close()
    return pages


async def vacuum(connection: asyncpg.Connection) -> None:
    """Does now what autovacuum does after a minute: it changes plans, and touches pages itself."""
    for (table,) in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'agl'"):
        await connection.execute(f"ALTER TABLE agl.{table} SET (autovacuum_enabled = false)")
        await connection.execute(f"VACUUM ANALYZE agl.{table}")


async def read_meter(meter: asyncpg.Connection, store: PostgresLightningStore) -> int:
    """Returns the number of pages of our tables and indexes that the store's connections have touched so far."""
    thread = backend_of(store)._thread

    async def report() -> None:
        for connection in (thread.writer._connection, *thread._readers._connections):
            while True:
                try:
                    await connection.execute("SELECT pg_stat_force_next_flush()")
                    break
                except asyncpg.InterfaceError:  # the connection is in use
                    await asyncio.sleep(0.001)

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(report(), thread._loop))
    await meter.execute("SELECT pg_stat_clear_snapshot()")
    sql = "SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit) FROM pg_statio_user_tables"
    return int(await meter.fetchval(sql))
