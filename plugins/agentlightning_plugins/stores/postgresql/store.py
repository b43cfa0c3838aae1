"""``PostgresLightningStore``: the engine over one PostgreSQL database."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self, TypeAlias, TypeVar

import asyncpg
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.backend import Listener, Page, Query
from agentlightning.store.engine import BackendStore
from agentlightning.types import DEFAULT_RUN_ID, Record
from agentlightning_plugins.stores.postgresql.connection import Server
from agentlightning_plugins.stores.postgresql.reader import (
    PLANNER,
    SPAN,
    Read,
    Readers,
    explain_plan,
    number_parameters,
)
from agentlightning_plugins.stores.postgresql.schema import migrate
from agentlightning_plugins.stores.postgresql.writer import Writer
from agentlightning_plugins.stores.shared.sql.batch import (
    COUNT,
    OPEN_RUNS,
    DurableBackend,
    Inbox,
    Item,
    count_all,
    settle_here,
)
from agentlightning_plugins.stores.shared.sql.changes import Work
from agentlightning_plugins.stores.shared.sql.plan import Plan
from agentlightning_plugins.stores.shared.sql.slow_log import SlowLog
from agentlightning_plugins.stores.shared.watchers import Watchers

R = TypeVar("R", bound=Record)

_MANY: Final = 64
"""More rows than this are decoded in a thread, so that they do not block the caller's event loop."""
_CHUNK: Final = 500
# Absolute ids of transactions: they begin again in another server, where a dump is restored, but for the offset.
_SNAPSHOT: Final = """
SELECT pg_snapshot_xmin(now)::text::bigint + xid_offset, pg_snapshot_xmax(now)::text::bigint + xid_offset,
    ARRAY(SELECT id::text::bigint + xid_offset FROM pg_snapshot_xip(now) AS id)
FROM pg_current_snapshot() AS now, agl.schema_version"""
_NEW_SPANS: Final = f"""
SELECT position, revision, {SPAN} AS record, sequence_id, xid FROM agl.span
WHERE run_id = ? AND xid >= ? AND (xid >= ? OR xid = ANY (?::bigint[])) AND xid < ? AND xid <> ALL (?::bigint[])
    AND (xid, position) > (?::bigint, ?::bigint) ORDER BY xid, position LIMIT ?"""  # noqa: S608 # our own names
_Snapshot: TypeAlias = tuple[int, int, list[int]]
"""Transactions below the first number had ended, none from the second on had begun, and the last ones were open."""
_SEEN: Final[TypeAdapter[tuple[_Snapshot, _Snapshot | None, int]]] = TypeAdapter(
    tuple[_Snapshot, _Snapshot | None, int]
)
"""The spans that polls have seen: all of one snapshot and, if a page was full, the next one's up to a transaction."""


class PostgresBackend(DurableBackend):
    """A backend in one database, which processes on several machines can open.

    A write returns when the server has confirmed that it is durable. Reads see the last commit.
    """

    def __init__(self, server: Server) -> None:
        """Connects, and creates or migrates the schema.

        Raises:
            ConfigError: the server refuses the user, or the schema is of a newer version.
            StoreError: the server cannot be reached.
        """
        self._slow = SlowLog(server.shown)
        self._thread = DatabaseThread(server)
        super().__init__(server.shown, DatabaseThread.stop, self._thread)

    @property
    def transactions(self) -> int:
        """How many transactions were committed."""
        return self._thread.writer.transactions

    def now(self) -> float:
        return self._thread.server.clock.now()

    async def select(self, query: Query[R]) -> Page[R]:
        if query.seen is not None:
            return await self._poll(query, query.seen)
        plan = PLANNER.plan(query)
        if not plan.is_done:
            page: Page[R] = await self._read(lambda connection: _filter(connection, query, plan), plan.sql)
            return page
        total = None
        if plan.count_sql is None:
            rows = await self._read(lambda connection: _fetch(connection, plan), plan.sql)
        else:
            rows, total = await self._read(lambda connection: _fetch_counted(connection, query, plan), plan.sql)
        if len(rows) < _MANY:
            return PLANNER.make_page(query, rows, total)
        return await asyncio.to_thread(PLANNER.make_page, query, rows, total)

    async def _poll(self, query: Query[R], seen: str) -> Page[R]:
        """Reads the spans that were committed since the last poll, whatever their positions, without waiting."""
        try:
            before, now, xid = _SEEN.validate_json(seen) if seen else ((0, 0, []), None, 0)
        except ValidationError as error:
            raise ConfigError(f"{seen!r} in a cursor is not from this store; pass on the cursor unchanged") from error
        (run_id,) = [condition.value for condition in query.where]
        after, is_last = query.after, False
        rows: list[Sequence[Any]] = []
        while len(rows) < query.limit and not is_last:  # what is left of the last snapshot, then a new one
            if now is None:
                now = tuple(await self._read(lambda connection: connection.fetchrow(_SNAPSHOT)))
                xid, after, is_last = 0, 0, True
            first = max(before[0], xid)
            plan = Plan(_NEW_SPANS, (run_id, first, *before[1:], *now[1:], xid, after, query.limit - len(rows)))
            rows += await self._read(functools.partial(_fetch, plan=plan), plan.sql)
            if len(rows) < query.limit:
                before, now = now, None
        page = await asyncio.to_thread(PLANNER.make_page, query, [row[:4] for row in rows], None)
        return page._replace(seen=_SEEN.dump_json((before, now, rows[-1][4] if now else 0)).decode())

    async def count(self) -> dict[str, int]:
        if self._thread.writer.refusal is not None:
            raise self._thread.writer.refusal
        return count_all(await self._read(lambda connection: connection.fetch(COUNT.format("agl."))))

    async def find_open_runs(self) -> list[str]:
        found = await self._read(lambda connection: connection.fetch(OPEN_RUNS.format("agl.", "a.live")))
        return [run_id for (run_id,) in found]

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self._thread.watchers.add(listener)

    def _submit(self, work: Work) -> asyncio.Future[Any]:
        return self._thread.writes.submit(work)

    async def _read(self, read: Read, sql: str | None = None) -> Any:
        async def timed(connection: asyncpg.Connection) -> Any:
            began = time.monotonic()
            try:
                return await read(connection)
            finally:
                took_s = time.monotonic() - began
                if sql is not None and self._slow.admits(sql, took_s):
                    self._thread.reads.submit(lambda connection: self._log_slow(connection, sql, took_s))

        self._check_open()
        work = self._thread.reads.submit(timed)
        try:
            return await work
        except asyncio.CancelledError:
            self._thread.cancel_read(work)
            raise

    async def _log_slow(self, connection: asyncpg.Connection, sql: str, took_s: float) -> None:
        self._slow.log(sql, took_s, await explain_plan(connection, sql))


class DatabaseThread:
    """A thread with an event loop in which the writer and the readers run."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.watchers = Watchers(server.shown)
        self.writer = Writer(server, self.watchers.publish)
        self._readers = Readers(server)
        self.writes: Inbox[Work] = Inbox(lambda items: self._hand_over(self.writer.take, items))
        self.reads: Inbox[Read] = Inbox(lambda items: self._hand_over(self._readers.take, items))
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None
        self._opened = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agl-postgresql", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """Ends the thread when all submitted work is done, and waits for that."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self.writer.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def cancel_read(self, work: asyncio.Future[Any]) -> None:
        """Cancels a read whose caller has been cancelled."""
        with self._lock:
            if not self._stopped:
                self._loop.call_soon_threadsafe(self._readers.cancel, work)

    def _hand_over(self, take: Callable[[list[Any]], None], items: list[Item[Any]]) -> None:
        with self._lock:
            if not self._stopped:
                self._loop.call_soon_threadsafe(take, items)
                return
        for item in items:
            item.error = StoreError(f"{self.server.shown} is closed")
        settle_here(items)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self) -> None:
        try:
            connection = await self._open()
            await self.writer.open(connection)
            self._error = None
        except Exception as error:  # isolation point: it is raised where the store is opened
            self._error = self.server.explain(error)
            return
        finally:
            self._opened.set()
        try:
            await self.writer.run()
        finally:
            await self._readers.close()

    async def _open(self) -> asyncpg.Connection:
        connection = await self.server.connect()
        try:
            await migrate(connection, self.server.shown)
        except BaseException:
            connection.terminate()
            raise
        return connection


async def _fetch(connection: asyncpg.Connection, plan: Plan) -> Sequence[Sequence[Any]]:
    rows: Sequence[Sequence[Any]] = await connection.fetch(number_parameters(plan.sql), *plan.parameters)
    return rows


async def _fetch_counted(
    connection: asyncpg.Connection, query: Query[R], plan: Plan
) -> tuple[Sequence[Sequence[Any]], int]:
    """Returns the rows and their total number from one snapshot."""
    assert plan.count_sql is not None
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        rows = await _fetch(connection, plan)
        total = PLANNER.total_of(query, rows)
        if total is None:
            total = await connection.fetchval(number_parameters(plan.count_sql), *plan.count_parameters)
        return rows, int(total or 0)


async def _filter(connection: asyncpg.Connection, query: Query[R], plan: Plan) -> Page[R]:
    """Filters the rows in Python where SQL cannot, in a thread that fetches a few at a time."""
    loop = asyncio.get_running_loop()
    is_cancelled = threading.Event()
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        cursor = await connection.cursor(number_parameters(plan.sql), *plan.parameters)

        def rows() -> Iterator[Sequence[Any]]:
            while chunk := asyncio.run_coroutine_threadsafe(cursor.fetch(_CHUNK), loop).result():
                yield from chunk
                if is_cancelled.is_set():
                    return

        filtering = loop.run_in_executor(None, PLANNER.finish, rows(), query)
        try:
            return await asyncio.shield(filtering)
        except asyncio.CancelledError:  # the thread stops after its chunk; until then it uses the connection
            is_cancelled.set()
            await asyncio.wait({filtering})
            raise


class PostgresLightningStore(BackendStore):
    """A store in a PostgreSQL database, for processes on many machines.

    Acknowledged writes are as durable as the server (``fsync`` and ``synchronous_commit`` on, as they are by
    default). Any number of processes can open the same database. Calls wait for a server that restarts, and nothing is
    written twice.
    """

    def __init__(
        self,
        url: str,
        run_id: str = DEFAULT_RUN_ID,
        *,
        lease_s: float = 60.0,
        watchdog_interval_s: float | None = 1.0,
        connections: int = 5,
        statement_timeout_s: float = 50.0,
        reconnect_s: float = 30.0,
    ) -> None:
        """Connects, and creates the schema ``agl`` or migrates it from an older version.

        Args:
            url: ``postgresql://user:password@host:5432/database``, as PostgreSQL's own tools take it; missing parts
                come from the environment (``PGHOST``, ``PGUSER``, ``PGPASSWORD``, ``~/.pgpass``).
            run_id: the run that this object sees.
            lease_s: an attempt is lost after this time without a span or a heartbeat.
            watchdog_interval_s: how late an overdue attempt may be ended; None leaves this to other processes.
            connections: maximum number of connections: one writes, the others read. Further reads queue.
            statement_timeout_s: the server cancels a statement that takes longer, and a search after 10 s; it is not
                executed again.
            reconnect_s: how long calls wait for a server that went away before they fail.

        Raises:
            ConfigError: the URL is malformed, a setting is out of range, the server refuses the user, or the schema is
                of a newer version.
            StoreError: the server cannot be reached.
        """
        server = Server(url, connections=connections, statement_timeout_s=statement_timeout_s, reconnect_s=reconnect_s)
        backend = PostgresBackend(server)
        try:
            super().__init__(backend, run_id, lease_s=lease_s, watchdog_interval_s=watchdog_interval_s)
        except BaseException:
            backend.stop()
            raise

    @classmethod
    def from_url(cls, url: str, *, run_id: str = DEFAULT_RUN_ID, token: str | None = None) -> Self:
        """Opens ``postgresql://...``.

        Raises:
            ConfigError: as the constructor, or a token was given.
        """
        if token is not None:
            raise ConfigError("postgresql:// takes no token: the server asks for the password in the URL")
        return cls(url, run_id)
