"""The backend over a PostgreSQL database: a thread with its own event loop owns the connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import asyncpg

from agentlightning.errors import StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Claim, Guard, Listener, Page, Query, Write
from agentlightning.types import Record, Rollout, Span
from agentlightning_plugins.stores.postgresql.condition import PLANNER, number_parameters
from agentlightning_plugins.stores.postgresql.connection import Server
from agentlightning_plugins.stores.postgresql.reader import Read, Readers
from agentlightning_plugins.stores.postgresql.schema import migrate
from agentlightning_plugins.stores.postgresql.writer import Writer
from agentlightning_plugins.stores.shared.sql.backend import COUNT, DurableBackend, count_all
from agentlightning_plugins.stores.shared.sql.batch import Inbox, Item, settle_here
from agentlightning_plugins.stores.shared.sql.changes import Append, Claiming, Commit, TakeNumbers, Work
from agentlightning_plugins.stores.shared.sql.plan import Plan
from agentlightning_plugins.stores.shared.watchers import Watchers

R = TypeVar("R", bound=Record)

_MANY: Final = 64
"""More rows than this are decoded in a thread, so that they do not block the caller's event loop."""
_CHUNK: Final = 500


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
        self._thread = DatabaseThread(server)
        super().__init__(server.shown, DatabaseThread.stop, self._thread)

    @property
    def transactions(self) -> int:
        """How many transactions were committed."""
        return self._thread.writer.transactions

    def now(self) -> float:
        return self._thread.server.clock.now()

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return bool(await self._write(Commit.encoded(writes, guards, events)))

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        claimed: Sequence[Rollout] = await self._write(Claiming(run_id, limit, decide))
        return claimed

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored: Sequence[Span | None] = await self._write(Append.encoded(spans, now))
        return stored

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not attempts:
            return []
        numbers: Sequence[int] = await self._write(TakeNumbers(attempts))
        return numbers

    async def select(self, query: Query[R]) -> Page[R]:
        plan = PLANNER.plan(query)
        if not plan.is_done:
            page: Page[R] = await self._read(lambda connection: _filter(connection, query, plan))
            return page
        total = None
        if plan.count_sql is None:
            rows = await self._read(lambda connection: _fetch(connection, plan))
        else:
            rows, total = await self._read(lambda connection: _fetch_counted(connection, plan))
        if len(rows) < _MANY:
            return PLANNER.make_page(query, rows, total)
        return await asyncio.to_thread(PLANNER.make_page, query, rows, total)

    async def count(self) -> dict[str, int]:
        if self._thread.writer.refusal is not None:
            raise self._thread.writer.refusal
        return count_all(await self._read(lambda connection: connection.fetch(COUNT.format("agl."))))

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self._thread.watchers.add(listener)

    def _write(self, work: Work) -> asyncio.Future[Any]:
        self._check_open()
        return self._thread.writes.submit(work)

    def _read(self, read: Read) -> asyncio.Future[Any]:
        self._check_open()
        return self._thread.reads.submit(read)


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


async def _fetch_counted(connection: asyncpg.Connection, plan: Plan) -> tuple[Sequence[Sequence[Any]], int]:
    """Returns the rows and their total number from one snapshot."""
    assert plan.count_sql is not None
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        total = await connection.fetchval(number_parameters(plan.count_sql), *plan.count_parameters)
        return await _fetch(connection, plan), int(total or 0)


async def _filter(connection: asyncpg.Connection, query: Query[R], plan: Plan) -> Page[R]:
    """Filters the rows in Python where SQL cannot, in a thread that fetches a few at a time."""
    loop = asyncio.get_running_loop()
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        cursor = await connection.cursor(number_parameters(plan.sql), *plan.parameters)

        def rows() -> Iterator[Sequence[Any]]:
            while chunk := asyncio.run_coroutine_threadsafe(cursor.fetch(_CHUNK), loop).result():
                yield from chunk

        return await loop.run_in_executor(None, PLANNER.finish, rows(), query)
