"""The backend over one SQLite file: writes go through the writer's thread, reads have connections of their own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from agentlightning.errors import StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Claim, Guard, Listener, Page, Query, Write
from agentlightning.types import Record, Rollout, Span
from agentlightning_plugins.stores.sql.document import encode
from agentlightning_plugins.stores.sql.plan import Plan
from agentlightning_plugins.stores.sqlite.condition import PLANNER
from agentlightning_plugins.stores.sqlite.plan import is_short, run_plan
from agentlightning_plugins.stores.sqlite.schema import connect, explain, open_file
from agentlightning_plugins.stores.sqlite.transaction import encode_writes
from agentlightning_plugins.stores.sqlite.writer import Writer

R = TypeVar("R", bound=Record)

_READERS: Final = 4
_COUNTED: Final = ("rollouts", "attempts", "spans", "resources", "workers")


class SqliteBackend:
    """A backend in one file, which several processes of one machine may have open.

    What is written is acknowledged when it is on disk. Reads see the last commit. Short reads are done where they are
    asked for, because handing them to a thread costs more than they do; others in a small pool.
    """

    durable = True

    def __init__(self, path: Path, *, busy_timeout_s: float = 30.0) -> None:
        """Opens the file, making or migrating it.

        Raises:
            ConfigError: it is something else, or was written by a newer version.
            StoreError: it cannot be opened.
        """
        open_file(path, busy_timeout_s)
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._process_id = os.getpid()
        self._idle: deque[sqlite3.Connection] = deque()
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="agl-sqlite-reader")
        self.writer = Writer(path, busy_timeout_s)
        self._stop = weakref.finalize(self, _stop, self._process_id, self.writer, self._pool, self._idle)

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        self._check_open()
        documents = encode_writes(writes)
        return await self.writer.submit(lambda transaction: transaction.commit(documents, guards, events))

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        self._check_open()
        return await self.writer.submit(lambda transaction: transaction.claim(run_id, limit, decide))

    async def select(self, query: Query[R]) -> Page[R]:
        self._check_open()
        plan = PLANNER.plan(query)
        with self._connection() as connection:
            if is_short(connection, query, plan):
                return run_plan(connection, query, plan)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._read, query, plan)

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        self._check_open()
        documents = [(span, encode(span)) for span in spans]
        return await self.writer.submit(lambda transaction: transaction.append(documents, now))

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        self._check_open()
        return await self.writer.submit(lambda transaction: transaction.next_sequence_ids(attempts))

    async def count(self) -> dict[str, int]:
        self._check_open()
        with self._connection() as connection:
            found = dict(connection.execute("SELECT name, sum(number) FROM tally GROUP BY name").fetchall())
        return {name: found.get(name, 0) for name in _COUNTED}

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self.writer.watch(listener)

    async def close(self) -> None:
        """Ends what was begun and closes the file."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """The same, for who has no event loop."""
        self._stop()

    def _read(self, query: Query[R], plan: Plan) -> Page[R]:
        with self._connection() as connection:
            return run_plan(connection, query, plan)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile."""
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

    def _check_open(self) -> None:
        if not self._stop.alive:
            raise StoreError(f"{self._path} is closed")
        if os.getpid() != self._process_id:
            raise StoreError(
                f"{self._path} was opened before this process was forked, and SQLite does not survive that; "
                "open the store in this process"
            )


def _stop(process_id: int, writer: Writer, pool: ThreadPoolExecutor, idle: deque[sqlite3.Connection]) -> None:
    if os.getpid() != process_id:  # a forked child has neither the threads nor a right to the connections
        return
    writer.stop()
    pool.shutdown()
    while idle:
        idle.pop().close()
