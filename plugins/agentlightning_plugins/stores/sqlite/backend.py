"""The backend over an SQLite file: a thread writes, and reads have their own connections."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from agentlightning.event import Event
from agentlightning.store.backend import Claim, Guard, Listener, Page, Query, Write
from agentlightning.types import Record, Rollout, Span
from agentlightning_plugins.stores.shared.sql.backend import COUNT, DurableBackend, count_all
from agentlightning_plugins.stores.shared.sql.changes import Append, Claiming, Commit, TakeNumbers, Work
from agentlightning_plugins.stores.shared.sql.plan import Plan
from agentlightning_plugins.stores.sqlite.condition import PLANNER
from agentlightning_plugins.stores.sqlite.plan import is_short, run_plan
from agentlightning_plugins.stores.sqlite.schema import connect, explain, open_file
from agentlightning_plugins.stores.sqlite.writer import Writer

R = TypeVar("R", bound=Record)

_READERS: Final = 4


class SqliteBackend(DurableBackend):
    """A backend in one file, which several processes of a machine can open.

    A write returns when it is on disk. Reads see the last commit. Short reads run in the caller's thread, because
    handing them to another thread costs more than the read; all others run in a small pool.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = 30.0) -> None:
        """Opens the file, and creates or migrates it.

        Raises:
            ConfigError: the file is not a store, or was written by a newer version.
            StoreError: the file cannot be opened.
        """
        open_file(path, busy_timeout_s)
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._idle: deque[sqlite3.Connection] = deque()
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="agl-sqlite-reader")
        self.writer = Writer(path, busy_timeout_s)
        super().__init__(str(path), _close, self.writer, self._pool, self._idle)

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return bool(await self._write(Commit.encoded(writes, guards, events)))

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        claimed: Sequence[Rollout] = await self._write(Claiming(run_id, limit, decide))
        return claimed

    async def select(self, query: Query[R]) -> Page[R]:
        self._check_open()
        plan = PLANNER.plan(query)
        with self._connection() as connection:
            if is_short(connection, query, plan):
                return run_plan(connection, query, plan)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._read, query, plan)

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored: Sequence[Span | None] = await self._write(Append.encoded(spans, now))
        return stored

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        numbers: Sequence[int] = await self._write(TakeNumbers(attempts))
        return numbers

    async def count(self) -> dict[str, int]:
        self._check_open()
        with self._connection() as connection:
            return count_all(connection.execute(COUNT.format("")))

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self.writer.watch(listener)

    def _write(self, work: Work) -> asyncio.Future[Any]:
        self._check_open()
        return self.writer.submit(lambda transaction: transaction.apply(work))

    def _read(self, query: Query[R], plan: Plan) -> Page[R]:
        with self._connection() as connection:
            return run_plan(connection, query, plan)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection for one reader."""
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = connect(self._path, self._busy_timeout_s)
                connection.execute("PRAGMA query_only = ON")
            try:
                yield connection
            finally:
                self._idle.append(connection)
        except sqlite3.Error as error:
            raise explain(error, self._path) from error


def _close(writer: Writer, pool: ThreadPoolExecutor, idle: deque[sqlite3.Connection]) -> None:
    writer.stop()
    with suppress(RuntimeError):  # garbage was collected in a thread of the pool, which cannot join itself
        pool.shutdown()
    while idle:
        idle.pop().close()
