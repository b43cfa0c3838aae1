"""The coroutine that writes: concurrent writes share a transaction and an fsync."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import asyncpg

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event
from agentlightning_plugins.stores.postgresql.connection import (
    MAX_CANCELLED,
    Server,
    close,
    drop_if_lost,
    is_lost,
    is_of_outage,
)
from agentlightning_plugins.stores.postgresql.events import PRUNE, TELL, EventReader
from agentlightning_plugins.stores.postgresql.schema import MIGRATED, check_version
from agentlightning_plugins.stores.postgresql.transaction import Transaction
from agentlightning_plugins.stores.shared.sql import batch
from agentlightning_plugins.stores.shared.sql.batch import Item, settle
from agentlightning_plugins.stores.shared.sql.changes import Claiming, Work
from agentlightning_plugins.stores.shared.sql.document import encode_events
from agentlightning_plugins.stores.shared.sql.parts import SharedParts

logger = logging.getLogger("agentlightning")
T = TypeVar("T")

MAX_BATCH: Final = 500
"""Maximum number of writes in a transaction, so that the first of them does not wait for long."""
MAX_BATCH_CHARACTERS: Final = 16_000_000
_MAX_LOCKED_S: Final = 60.0
"""A row that another transaction keeps locked for longer is an error."""
_MAX_CLAIM_S: Final = 5.0
"""A claim ignores queued rollouts that are locked for longer, longer than a stopped process can hold them."""
_MAX_BUSY_S: Final = 0.05
"""The longest pause before a row that another transaction has locked is tried again."""
_ANNOUNCE_S: Final = 0.01
"""How long a process with more to write may delay waking other processes."""
LOOK_EVERY_S: Final = 1.0
"""How often events are read without a notification: a process may be killed between its commit and its NOTIFY."""
SETTINGS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "lock_timeout": "2s",
    "idle_in_transaction_session_timeout": "2s",
}
"""The settings of the connection. A process that is stopped in a transaction loses its locks after two seconds."""
# The lock is held as long as the connection, so that no two processes count in the same rows.
SLOT: Final = "SELECT n FROM generate_series(1, 100000) AS n WHERE pg_try_advisory_lock(x'41474C02'::int, n) LIMIT 1"
_MARK: Final = """
INSERT INTO agl.writer (origin, number) VALUES ($1, $2)
ON CONFLICT (origin) DO UPDATE SET number = excluded.number, seen = now()"""
_MARKED: Final = "SELECT number FROM agl.writer WHERE origin = $1 FOR UPDATE"
_FORGET: Final = (
    "DELETE FROM agl.writer WHERE seen < now() - interval '7 days'",
    # Events of another server whose dump was restored here: transaction ids have started again.
    "DELETE FROM agl.event WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint",
    # Polls find spans by transaction: after such a restore, new spans get ids far above any that a poll has seen.
    """UPDATE agl.schema_version SET xid_offset = newest + 1000000000000 FROM (
        SELECT max(last.xid) AS newest FROM (SELECT DISTINCT run_id FROM agl.tally WHERE name = 'spans') AS run,
            LATERAL (SELECT xid FROM agl.span WHERE run_id = run.run_id ORDER BY xid DESC LIMIT 1) AS last
    ) AS found WHERE newest >= xid_offset + pg_snapshot_xmax(pg_current_snapshot())::text::bigint""",
)
_CONFLICTS: Final = (
    asyncpg.UniqueViolationError,  # another process inserted the same record at the same time
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
)


class Writer:
    """Writes over one connection, in the event loop in which it was opened."""

    def __init__(self, server: Server, publish: Callable[[Sequence[Event]], None]) -> None:
        """Makes a writer.

        Args:
            server: the server to write to.
            publish: called with the events of each commit of any process, in commit order.
        """
        self._server = server
        self._publish = publish
        self._origin = int.from_bytes(os.urandom(7))
        """Identifies this process's transactions and events."""
        self._events = EventReader(self._origin, publish)
        self._connection: asyncpg.Connection
        self._slot = 0
        self._parts = SharedParts()
        self._number = 0
        """The number of the current transaction, which is stored with it."""
        self._is_certain = True
        """False if the connection was lost before the answer to COMMIT."""
        self._unannounced: int | None = None
        """The position of our last events, if other processes were not notified of them yet."""
        self._unannounced_since = 0.0
        self._items: deque[Item[Work]] = deque()
        self._tries: dict[Item[Work], int] = {}
        """The items that wait for rows that other transactions have locked, with how often they were tried."""
        self._wake = asyncio.Event()
        self._must_look = False
        self._must_check_schema = False
        self.refusal: ConfigError | None = None
        """Set when a newer version has changed the schema so that this version cannot write to it."""
        self._stopped = False
        self.transactions = 0
        """Number of committed transactions."""

    async def open(self, connection: asyncpg.Connection) -> None:
        """Starts to listen for the commits of other processes, over a connection that the writer takes over."""
        await self._adopt(connection)
        for statement in _FORGET:
            await connection.execute(statement)
        await connection.execute(_MARK, self._origin, 0)
        await self._events.open(connection, self._server.clock.now())

    def take(self, items: Iterable[Item[Work]]) -> None:
        """Accepts work."""
        self._items.extend(items)
        self._wake.set()

    def stop(self) -> None:
        """Ends ``run`` when all accepted work is done."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Writes until stopped."""
        try:
            while True:
                try:
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wake.wait()
                except TimeoutError:
                    self._must_look = True
                self._wake.clear()
                while self._items:
                    await self._write_next()
                await self._notify()
                if self._stopped and not self._tries:
                    return
                if self._must_look or self._server.clock.is_due:
                    await self._look()
        finally:
            await close(self._connection)

    async def _write_next(self) -> None:
        """Writes as many items as fit into one transaction."""
        items: list[Item[Work]] = []
        size = 0
        while self._items and len(items) < MAX_BATCH and size < MAX_BATCH_CHARACTERS:
            items.append(self._items.popleft())
            size += items[-1].work.size
        why = await self._check_schema() if self._must_check_schema else self.refusal
        if why is not None:
            self._settle_error(items, why)
            return
        try:
            await self._write(items)
        except Exception as error:  # isolation point: every caller gets the error and this coroutine goes on
            is_cancelled = isinstance(error, asyncpg.QueryCanceledError)  # each of them could take as long again
            if len(items) > 1 and self._is_certain and not (is_cancelled or self._connection.is_closed()):
                for item in items:  # each in its own transaction, so that only the culprit fails
                    try:
                        await self._write([item])
                    except _CONFLICTS as conflict:
                        self._retry_later(item, conflict)
                    except Exception as own_error:  # isolation point: as above
                        self._settle_error([item], own_error)
            elif isinstance(error, _CONFLICTS) and self._is_certain:
                self._retry_later(items[0], error)
            else:
                self._settle_error(items, error)

    def _settle_error(self, items: Sequence[Item[Work]], error: Exception) -> None:
        for item in items:
            self._tries.pop(item, None)
            item.error = self._server.explain(error)
        settle(items)

    async def _write(self, items: Sequence[Item[Work]]) -> None:
        """Writes items in one transaction, once, however often the connection is lost."""
        self._number += 1
        busy: list[Item[Work]] = []
        events: list[Event] = []

        async def write(connection: asyncpg.Connection) -> None:
            nonlocal busy, events
            if not self._is_certain and await self._was_committed(connection):
                return
            await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            try:
                transaction = Transaction(connection, self._slot, self._parts)
                busy = await transaction.apply(items)
                events = transaction.changes.events
                if not transaction.changes.steps and not events:
                    await connection.execute("ROLLBACK")
                    return
                await transaction.write()
                if events:
                    self._must_look = False  # events of which this process was notified so far are read now
                    await self._events.read(connection, self._server.clock.now())  # before our events
                    if self._unannounced is None:
                        self._unannounced_since = time.monotonic()
                    self._unannounced = await connection.fetchval(TELL, self._origin, encode_events(events))
                await connection.execute(_MARK, self._origin, self._number)
                self._is_certain = False
                await connection.execute("COMMIT")
                self._is_certain = True
            except BaseException as error:
                self._parts.forget()
                if isinstance(error, Exception) and not is_lost(connection, error):
                    self._is_certain = True
                    await connection.execute("ROLLBACK")
                raise
            self.transactions += 1

        self._is_certain = True
        await self._retry(write)
        if events:
            self._publish(events)
        for item in busy:
            self._retry_later(item)
        done = [item for item in items if item not in busy]
        for item in done:
            self._tries.pop(item, None)
        settle(done)
        if time.monotonic() - self._unannounced_since > _ANNOUNCE_S:
            await self._notify()

    async def _was_committed(self, connection: asyncpg.Connection) -> bool:
        """Returns whether the transaction was committed whose answer was lost."""
        while True:
            try:
                is_committed: bool = await connection.fetchval(_MARKED, self._origin) == self._number
            except asyncpg.LockNotAvailableError:  # the server has not ended it yet
                continue
            self._is_certain = True
            return is_committed

    def _retry_later(self, item: Item[Work], conflict: Exception | None = None) -> None:
        """Tries an item again after a short pause: another transaction has locked one of its rows."""
        tries = self._tries[item] = self._tries.get(item, -1) + 1
        if isinstance(item.work, Claiming) and tries * _MAX_BUSY_S > _MAX_CLAIM_S:
            self._tries.pop(item)
            settle([item])
            return
        if tries * _MAX_BUSY_S > _MAX_LOCKED_S:
            why = "another transaction keeps a record locked; end it"
            self._settle_error([item], conflict or StoreError(f"{self._server.shown}: {why}"))
            return
        asyncio.get_running_loop().call_later(min(0.001 * 2**tries, _MAX_BUSY_S), self.take, [item])

    async def _retry(self, work: Callable[[asyncpg.Connection], Awaitable[T]]) -> T:
        """Does work that may be repeated until the server has answered it."""
        cancelled = 0
        deadline: float | None = None
        while True:
            if self._connection.is_closed():
                await self._reconnect()
            began = time.monotonic()
            try:
                return await work(self._connection)
            except asyncpg.QueryCanceledError:
                if (
                    not self._connection.is_closed() and self._connection.is_in_transaction()
                ):  # its BEGIN or its end was cancelled
                    self._connection.terminate()
                cancelled += 1
                if cancelled > MAX_CANCELLED or self._server.is_timed_out(began):
                    raise
            except Exception as error:  # if the connection is lost, the outcome of the work is unknown
                if not is_lost(self._connection, error):
                    raise
                self._connection.terminate()
                deadline = deadline or time.monotonic() + self._server.reconnect_s
                if time.monotonic() > deadline:  # each new connection is lost, too, or never answers this statement
                    raise

    async def _notify(self) -> None:
        """Wakes the other processes.

        This takes a separate transaction: PostgreSQL lets only one transaction with a NOTIFY commit at a time, and that
        one need not wait for the disk.
        """
        if self._unannounced is None:
            return
        position, self._unannounced = self._unannounced, None
        try:
            await self._connection.execute("SELECT pg_notify('agl', $1)", str(self._origin))
            if position % batch.PRUNE_EVERY == 0:
                await self._connection.execute(PRUNE, position - batch.KEPT_EVENTS)
        except Exception as error:  # isolation point: the writer must go on
            logger.debug("cannot wake other processes, which poll for events anyway: %s", error)
            drop_if_lost(self._connection, error)

    async def _look(self) -> None:
        """Publishes what other processes committed."""
        self._must_look = False
        try:
            if self._connection.is_closed():
                await self._reconnect()
            if self._must_check_schema or self._server.clock.is_due:
                await self._check_schema()
            if self._server.clock.is_due:
                await self._server.measure_clock(self._connection)
            await self._events.read(self._connection, self._server.clock.now())
        except Exception as error:  # isolation point: a server that is away for a while must not end the writer
            drop_if_lost(self._connection, error)
            if not is_of_outage(error):
                why = self._server.explain(error)
                logger.warning("cannot read the events of other processes; trying again: %s", why)
            asyncio.get_running_loop().call_later(1.0, self._look_soon)

    async def _check_schema(self) -> Exception | None:
        """Returns why nothing can be written, permanently (if a newer version has changed the schema) or for now."""
        self._must_check_schema = False  # before the check: a migration during it requires another check
        try:
            await self._retry(lambda connection: check_version(connection, self._server.shown))
        except Exception as error:  # isolation point: every caller gets the error and the writer goes on
            if isinstance(error, ConfigError) and not self._connection.is_closed():
                logger.error("%s; this process no longer writes", error)
                self.refusal = error
            else:  # the server is away, or refuses the connection
                self._must_check_schema = True
            return error
        return self.refusal

    async def _reconnect(self) -> None:
        await self._server.reconnect(self._adopt)
        self._must_check_schema = True
        self._look_soon()

    async def _adopt(self, connection: asyncpg.Connection) -> None:
        try:
            for name, value in SETTINGS.items():
                await connection.execute(f"SET {name} = '{value}'")
            self._slot = await connection.fetchval(SLOT)
            await self._server.measure_clock(connection)
            await connection.add_listener("agl", self._notified)
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(lambda _: self._look_soon())
        self._parts.forget()  # another server may have taken over, or the database was restored
        self._connection = connection

    def _notified(self, connection: object, pid: int, channel: str, payload: object) -> None:
        if payload == MIGRATED:
            self._must_check_schema = True
        if payload != str(self._origin):
            self._look_soon()

    def _look_soon(self) -> None:
        self._must_look = True
        self._wake.set()
