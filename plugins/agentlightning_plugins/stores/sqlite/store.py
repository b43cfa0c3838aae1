"""``SqliteLightningStore``: the engine over one SQLite file, which one thread writes and several read."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from agentlightning.errors import ConfigError
from agentlightning.store.backend import Listener, Page, Query
from agentlightning.store.engine import BackendStore
from agentlightning.store.url import hide_password
from agentlightning.types import DEFAULT_RUN_ID, Record
from agentlightning_plugins.stores.shared.clock import since_boot
from agentlightning_plugins.stores.shared.sql.batch import COUNT, OPEN_RUNS, DurableBackend, count_all
from agentlightning_plugins.stores.shared.sql.changes import Work
from agentlightning_plugins.stores.shared.sql.plan import SEARCH_S, Plan
from agentlightning_plugins.stores.shared.sql.slow_log import SlowLog
from agentlightning_plugins.stores.sqlite.plan import PLANNER, is_short, run_plan
from agentlightning_plugins.stores.sqlite.schema import compact, connect, explain, open_file
from agentlightning_plugins.stores.sqlite.writer import Writer

R = TypeVar("R", bound=Record)

_READERS: Final = 4
_STEPS: Final = 1_000_000
"""Instructions of SQLite, some 20 ms, after which a read looks whether its caller is still there and has time left."""


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
        self._booted_at = open_file(path, busy_timeout_s)
        self._path = path = path.absolute()  # a command may change to the folder of its configuration
        self._busy_timeout_s = busy_timeout_s
        self._idle: deque[sqlite3.Connection] = deque()
        self._slow = SlowLog(str(path))
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="agl-sqlite-reader")
        self.writer = Writer(path, busy_timeout_s, self._booted_at)
        super().__init__(str(path), _close, self.writer, self._pool, self._idle)

    def now(self) -> float:
        return self._booted_at + since_boot()

    async def select(self, query: Query[R]) -> Page[R]:
        self._check_open()
        plan = PLANNER.plan(query)
        with self._connection() as connection:
            if is_short(connection, query, plan):
                return run_plan(connection, query, plan)
        is_cancelled = threading.Event()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._read, query, plan, is_cancelled)
        finally:
            is_cancelled.set()

    async def count(self) -> dict[str, int]:
        self._check_open()
        with self._connection() as connection:
            return count_all(connection.execute(COUNT.format("")))

    async def find_open_runs(self) -> list[str]:
        self._check_open()
        with self._connection() as connection:
            return [run_id for (run_id,) in connection.execute(OPEN_RUNS.format("", "a.live = 1"))]

    def watch(self, listener: Listener) -> Callable[[], None]:
        return self.writer.watch(listener)

    def _submit(self, work: Work) -> asyncio.Future[Any]:
        return self.writer.submit(lambda transaction: transaction.apply(work))

    def _read(self, query: Query[R], plan: Plan, is_cancelled: threading.Event) -> Page[R]:
        with self._connection() as connection:
            began = time.monotonic()
            limit_s = SEARCH_S if plan.is_done else 2 * SEARCH_S  # a search in Python ends by itself

            def must_end() -> bool:
                return is_cancelled.is_set() or time.monotonic() - began > limit_s

            connection.set_progress_handler(must_end, _STEPS)
            try:
                return run_plan(connection, query, plan)
            finally:
                connection.set_progress_handler(None, 0)
                took_s = time.monotonic() - began
                if self._slow.admits(plan.sql, took_s):
                    steps = connection.execute(f"EXPLAIN QUERY PLAN {plan.sql}", plan.parameters)
                    self._slow.log(plan.sql, took_s, [detail for *_, detail in steps])

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


class SqliteLightningStore(BackendStore):
    """A store in one file: acknowledged writes survive SIGKILL and power failure.

    Several processes of one machine may open the same file. Not for network file systems, whose locks and shared memory
    SQLite cannot rely on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run_id: str = DEFAULT_RUN_ID,
        *,
        lease_s: float = 60.0,
        watchdog_interval_s: float | None = 1.0,
        busy_timeout_s: float = 30.0,
    ) -> None:
        """Opens the file, or creates it with its folders. A file of an older version is migrated.

        Args:
            path: the file; SQLite keeps two more next to it (``-wal`` and ``-shm``) while it is open.
            run_id: the run that this object sees.
            lease_s: an attempt is lost after this time without a span or a heartbeat.
            watchdog_interval_s: how late an overdue attempt may be ended; None leaves this to other processes.
            busy_timeout_s: how long a write waits for other processes before it fails.

        Raises:
            ConfigError: the file is not a store, or was written by a newer version; it is not changed.
            StoreError: the file cannot be opened.
        """
        if not busy_timeout_s > 0:
            raise ConfigError(f"busy_timeout_s={busy_timeout_s}; it must be above 0")
        self._path, self._busy_timeout_s = Path(path), busy_timeout_s
        backend = SqliteBackend(Path(path), busy_timeout_s=busy_timeout_s)
        try:
            super().__init__(backend, run_id, lease_s=lease_s, watchdog_interval_s=watchdog_interval_s)
        except BaseException:
            backend.stop()
            raise

    async def compact(self) -> AsyncGenerator[int]:
        """Returns the space of deleted records to the file system, in slices with pauses for other programs.

        Yields the size of the file in bytes: at first, then after each slice.

        Raises:
            StoreError: the disk is full, or other processes keep the file locked; what was returned stays returned.
        """
        shrinking = compact(self._path, self._busy_timeout_s)
        while (size := await asyncio.to_thread(next, shrinking, None)) is not None:
            yield size

    @classmethod
    def from_url(cls, url: str, *, run_id: str = DEFAULT_RUN_ID, token: str | None = None) -> Self:
        """Opens ``sqlite:///relative/path`` or ``sqlite:////absolute/path``.

        Raises:
            ConfigError: no path, a host, or a token.
        """
        host, slash, path = url.partition("://")[2].partition("/")
        if host or not slash or not path or path == ":memory:":
            raise ConfigError(
                f"store {hide_password(url)!r} names no file; write sqlite:///store.db for one in the working "
                "directory, sqlite:////var/lib/store.db for an absolute path, or memory:// for none"
            )
        if token is not None:
            raise ConfigError("sqlite:/// takes no token: the permissions of the file control access")
        return cls(path, run_id)
