"""The backend over one PostgreSQL database: a thread with an event loop of its own owns the connections."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import asyncpg

from agentlightning.errors import StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Claim, Guard, Listener, Page, Query, Write
from agentlightning.types import Record, Rollout, Span
from agentlightning_plugins.stores.postgresql.condition import PLANNER, number_parameters
from agentlightning_plugins.stores.postgresql.connection import Server
from agentlightning_plugins.stores.postgresql.operation import Claiming, Operation, Work
from agentlightning_plugins.stores.postgresql.reader import Readers, make_lookup
from agentlightning_plugins.stores.postgresql.reader import Work as Read
from agentlightning_plugins.stores.postgresql.schema import migrate
from agentlightning_plugins.stores.postgresql.writer import Writer
from agentlightning_plugins.stores.sql.batch import Inbox, Item, settle_here
from agentlightning_plugins.stores.sql.plan import Plan

logger = logging.getLogger("agentlightning")
R = TypeVar("R", bound=Record)

_COUNT: Final = "SELECT name, sum(number)::bigint FROM agl.tally GROUP BY name"
_COUNTED: Final = ("rollouts", "attempts", "spans", "resources", "workers")
_MANY: Final = 64
"""More rows than this are decoded in a thread, so that the caller's event loop goes on meanwhile."""
_CHUNK: Final = 500


class PostgresBackend:
    """A backend in one database, which several processes of several machines may have open.

    What is written is acknowledged when the server says that it is durable. Reads see the last commit.
    """

    durable = True

    def __init__(self, server: Server) -> None:
        """Connects, making or migrating what is in the database.

        Raises:
            ConfigError: the server refuses us, or its database is of a newer version.
            StoreError: the server is not there.
        """
        self._thread = DatabaseThread(server)
        self._process_id = os.getpid()
        self._stop = weakref.finalize(self, _stop, self._process_id, self._thread)

    @property
    def transactions(self) -> int:
        """How many were committed."""
        return self._thread.writer.transactions

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return bool(await self._write(Operation.commit(writes, guards, events)))

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        claimed: Sequence[Rollout] = await self._write(Claiming(run_id, limit, decide))
        return claimed

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored: Sequence[Span | None] = await self._write(Operation.append(spans, now))
        return stored

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        if not attempts:
            return []
        numbers: Sequence[int] = await self._write(Operation.take_numbers(attempts))
        return numbers

    async def select(self, query: Query[R]) -> Page[R]:
        plan = PLANNER.plan(query)
        if not plan.is_done:
            page: Page[R] = await self._read(lambda connection: _filter(connection, query, plan))
            return page
        total = None
        if plan.count_sql is None:
            rows = await self._read(make_lookup(plan) or (lambda connection: _fetch(connection, plan)))
        else:
            rows, total = await self._read(lambda connection: _fetch_counted(connection, plan))
        if len(rows) < _MANY:
            return PLANNER.make_page(query, rows, total)
        return await asyncio.to_thread(PLANNER.make_page, query, rows, total)

    async def count(self) -> dict[str, int]:
        found = dict(await self._read(lambda connection: connection.fetch(_COUNT)))
        return {name: found.get(name, 0) for name in _COUNTED}

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self._thread.watch(listener)

    async def close(self) -> None:
        """Ends what was begun and closes the connections."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """The same, for who has no event loop."""
        self._stop()

    def _write(self, work: Work) -> asyncio.Future[Any]:
        self._check_open()
        return self._thread.writes.submit(work)

    def _read(self, look: Read) -> asyncio.Future[Any]:
        self._check_open()
        return self._thread.reads.submit(look)

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StoreError(f"{self._thread.server.shown} is closed")
        if os.getpid() != self._process_id:
            raise StoreError(
                f"{self._thread.server.shown} was opened before this process was forked, and its connections belong to "
                "the parent; open the store in this process"
            )


class DatabaseThread:
    """The thread, its event loop, and what runs there."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.writes: Inbox[Work] = Inbox(lambda items: self._hand_over(self._take_writes, items))
        self.reads: Inbox[Read] = Inbox(lambda items: self._hand_over(self._take_reads, items))
        self.writer: Writer
        self._readers: Readers
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None
        self._opened = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agl-postgresql", daemon=True)
        self._thread.start()
        self._opened.wait()
        self._raise_error()

    def watch(self, listener: Listener) -> Callable[[], None]:
        with self._lock:
            self._listeners += (listener,)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)

        return stop

    def _raise_error(self) -> None:
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """Ends the thread when it has done what was submitted; waits for that."""
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

    def _take_writes(self, items: list[Item[Work]]) -> None:
        self.writer.take(items)

    def _take_reads(self, items: list[Item[Read]]) -> None:
        self._readers.take(items)

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
            self.writer = Writer(self.server, self._tell)
            self._readers = Readers(self.server)
            await self.writer.open(connection)
        except Exception as error:  # isolation point: it is raised where the store is opened
            is_theirs = isinstance(error, (OSError, asyncpg.PostgresError, asyncpg.InterfaceError))
            self._error = self.server.explain(error) if is_theirs else error
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

    def _tell(self, events: Sequence[Event]) -> None:
        for listener in self._listeners:
            try:
                listener(events)
            except Exception:  # isolation point: one watcher must not fail the writer or other watchers
                logger.exception("a watcher of the store %s failed", self.server.shown)


async def _fetch(connection: asyncpg.Connection, plan: Plan) -> Sequence[Sequence[Any]]:
    rows: Sequence[Sequence[Any]] = await connection.fetch(number_parameters(plan.sql), *plan.parameters)
    return rows


async def _fetch_counted(connection: asyncpg.Connection, plan: Plan) -> tuple[Sequence[Sequence[Any]], int]:
    """The rows, and how many there are in all, of one snapshot."""
    assert plan.count_sql is not None
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        total = await connection.fetchval(number_parameters(plan.count_sql), *plan.count_parameters)
        return await _fetch(connection, plan), int(total or 0)


async def _filter(connection: asyncpg.Connection, query: Query[R], plan: Plan) -> Page[R]:
    """Tests in Python what SQL only narrowed down, in a thread that is fed a few rows at a time."""
    loop = asyncio.get_running_loop()

    async with connection.transaction(isolation="repeatable_read", readonly=True):
        cursor = await connection.cursor(number_parameters(plan.sql), *plan.parameters)

        def rows() -> Iterator[Sequence[Any]]:
            while chunk := asyncio.run_coroutine_threadsafe(cursor.fetch(_CHUNK), loop).result():
                yield from chunk

        return await loop.run_in_executor(None, PLANNER.finish, rows(), query)


def _stop(process_id: int, thread: DatabaseThread) -> None:
    if os.getpid() == process_id:  # a forked child has neither the thread nor a right to the connections
        thread.stop()
