"""The coroutine that writes: concurrent writes share a transaction and an fsync."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import asyncpg
import orjson
from pydantic import ValidationError

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event
from agentlightning.store.backend import Row
from agentlightning.types import Rollout
from agentlightning_plugins.stores.postgresql.connection import MAX_CANCELLED, Server, close, drop_if_lost, is_lost
from agentlightning_plugins.stores.postgresql.missed_events import read_missed_events
from agentlightning_plugins.stores.postgresql.operation import Batch, Claiming, Operation, Work
from agentlightning_plugins.stores.postgresql.schema import KEPT_EVENTS, MIGRATED, check_version
from agentlightning_plugins.stores.postgresql.statement import CANDIDATES, FORGET, NEW_EVENTS, OUTCOME, SLOT, WRITE
from agentlightning_plugins.stores.sql.batch import Item, settle
from agentlightning_plugins.stores.sql.document import decode, decode_events, encode_events

logger = logging.getLogger("agentlightning")

MAX_BATCH: Final = 500
"""Maximum number of writes in a batch, so that the first of them does not wait for long."""
MAX_BATCH_CHARACTERS: Final = 16_000_000
_MAX_LOCKED_S: Final = 60.0
"""A row that another transaction keeps locked for longer is an error."""
_ANNOUNCE_S: Final = 0.01
"""How long a process with more to write may delay waking the others."""
LOOK_EVERY_S: Final = 1.0
"""How often events are read without a notification: a process may be killed between its commit and its NOTIFY."""
_PRUNE_EVERY: Final = 64
_MAX_BUSY_S: Final = 0.05
"""The longest pause before a row that another transaction has locked is tried again."""
_PRUNE: Final = "DELETE FROM agl.event WHERE position <= $1"


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
        """Identifies this process's batches and events."""
        self._connection: asyncpg.Connection
        self._slot = 0
        self._number = 0
        self._horizon = 0
        """Events of transactions below this id have been read."""
        self._seen: dict[int, tuple[int, int]] = {}
        """The position and transaction id of the last event of each other process that is not below the horizon."""
        self._newest = 0
        """The greatest position of an event that was read or written."""
        self._unannounced: int | None = None
        """The position of our last events, if other processes were not notified of them yet."""
        self._unannounced_since = 0.0
        self._up_to_date_at = self._server.clock.now()
        self._items: deque[Item[Work]] = deque()
        self._busy = 0
        """How many items wait for rows that other transactions have locked."""
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
        for statement in FORGET:
            await connection.execute(statement)
        horizon, _, self._newest = await self._read_events(2**62)
        _, events, _ = await self._read_events(horizon)
        self._publish_new(horizon, events, is_new=False)

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
                if self._stopped and not self._busy:
                    return
                if self._must_look or self._server.clock.is_due:
                    await self._look()
        finally:
            await close(self._connection)

    async def _write_next(self) -> None:
        """Writes as many items as fit into one transaction."""
        items: list[Item[Work]] = []
        while self._items and len(items) < MAX_BATCH:
            items.append(self._items.popleft())
        why = await self._check_schema() if self._must_check_schema else self.refusal
        if why is not None:
            self._settle_error(items, why)
            return
        try:
            await self._write(items)
        except Exception as error:  # isolation point: every caller gets the error and this coroutine goes on
            if len(items) > 1 and not self._connection.is_closed():
                for item in items:  # each in its own transaction, so that only the culprit fails
                    try:
                        await self._write([item])
                    except Exception as own_error:  # isolation point: as above
                        self._settle_error([item], own_error)
            else:
                self._settle_error(items, error)

    def _settle_error(self, items: Sequence[Item[Work]], error: Exception) -> None:
        for item in items:
            item.error = self._server.explain(error)
        settle(items)

    async def _write(self, items: Sequence[Item[Work]]) -> None:
        """Writes items in one transaction; those that have to wait are put back."""
        claimed, done = await self._find_candidates([item for item in items if isinstance(item.work, Claiming)])
        waiting = claimed + [(item, item.work) for item in items if isinstance(item.work, Operation)]
        later: list[Item[Work]] = []
        busy: list[tuple[Item[Work], Operation]] = []
        while waiting:
            batch = Batch()
            for item, operation in waiting:
                if batch.size >= MAX_BATCH_CHARACTERS or not batch.add(item, operation):
                    later.append(item)
            failed, numbers = await self._send(batch)
            for member, (item, operation) in enumerate(batch.members):
                if not failed:
                    item.result = operation.result(batch.numbers_of(member, numbers))
                    if isinstance(item.work, Claiming):
                        item.result = [row.record for row, _ in item.work.candidates]
                    done.append(item)
            # If one member could not be written, nothing was: the others are sent again without it.
            waiting = [member for member in batch.members if failed and member[0] not in failed]
            for item, outcome in failed.items():
                if isinstance(item.work, Claiming):  # another process was faster: look for other candidates
                    later.append(item)
                elif outcome is None:
                    busy.append((item, item.work))
                else:
                    item.result, item.error = outcome, outcome if isinstance(outcome, Exception) else None
                    done.append(item)
        self._items.extendleft(reversed(later))  # after all that may fail: a failure writes each item separately
        for item, operation in busy:
            self._retry_later(item, operation)
        settle(done)
        if time.monotonic() - self._unannounced_since > _ANNOUNCE_S:
            await self._notify()

    def _retry_later(self, item: Item[Work], operation: Operation) -> None:
        """Tries an item again after a short pause: another transaction has locked one of its rows."""
        pause_s = min(0.001 * 2**operation.tries, _MAX_BUSY_S)
        operation.tries += 1
        if operation.tries * _MAX_BUSY_S > _MAX_LOCKED_S:
            error = StoreError(f"{self._server.shown}: another transaction keeps a record locked; end it")
            self._settle_error([item], error)
            return
        self._busy += 1

        def retry() -> None:
            self._busy -= 1
            self.take([item])

        asyncio.get_running_loop().call_later(pause_s, retry)

    async def _find_candidates(
        self, items: Sequence[Item[Work]]
    ) -> tuple[list[tuple[Item[Work], Operation]], list[Item[Work]]]:
        """Gives the heads of queues to claims; returns the claims as operations, and those that are already done."""
        queues: dict[str, list[Item[Work]]] = {}
        for item in items:
            assert isinstance(item.work, Claiming)
            item.error, item.work.candidates = None, []
            queues.setdefault(item.work.run_id, []).append(item)
        operations: list[tuple[Item[Work], Operation]] = []
        done: list[Item[Work]] = []
        for run_id, claims in queues.items():
            limit = sum(item.work.limit for item in claims if isinstance(item.work, Claiming))
            rows = deque(await self._retry(lambda c, r=run_id, n=limit: c.fetch(CANDIDATES, r, n)))  # type: ignore[misc] # the loop's values
            for item in claims:
                assert isinstance(item.work, Claiming)
                while rows and len(item.work.candidates) < item.work.limit:
                    revision, attempts, record, _ = rows.popleft()
                    item.work.candidates.append((Row(decode(Rollout, record), revision), attempts))
                try:
                    if item.work.candidates:
                        operations.append((item, item.work.claim()))
                        continue
                    item.result = []
                except Exception as error:  # isolation point: one caller's failure is not the others'
                    item.error = error
                done.append(item)
        return operations, done

    async def _send(self, batch: Batch) -> tuple[dict[Item[Work], bool | Exception | None], Sequence[int | None]]:
        """Writes a batch once, however often the connection is lost; or returns which of its members failed."""
        self._number += 1
        number = self._number
        parameters = batch.parameters
        events = [event for _, operation in batch.members for event in operation.events]
        text = encode_events(events) if events else None

        async def write(connection: asyncpg.Connection) -> Any:
            seen = orjson.dumps({str(origin): position for origin, (position, _) in self._seen.items()}).decode()
            self._must_look = False  # the statement reads the events of which this process was notified so far
            state = (self._origin, number, self._slot, text, self._horizon, seen)
            return await connection.fetchrow(WRITE, *parameters, *state)

        horizon, heard, failed_text, outcome_text = await self._retry(write)
        self._publish_new(horizon, heard)
        failed = orjson.loads(failed_text or "[]")
        if any(why == "repeated" for _, _, why in failed):  # it was committed, but the answer was lost
            outcome_text = await self._retry(lambda c: c.fetchval(OUTCOME, self._origin, number))
        elif failed:
            return batch.failures(failed), ()
        outcome = orjson.loads(outcome_text)
        self.transactions += 1
        if outcome["told"] is not None:
            self._note_published(outcome["told"])
        if events:
            self._publish(events)
        return {}, outcome["numbers"] or ()

    async def _retry(self, work: Callable[[asyncpg.Connection], Any]) -> Any:
        """Runs a statement, which may be repeated, until the server has answered it."""
        tries = cancelled = 0
        deadline: float | None = None
        while True:
            if self._connection.is_closed():
                await self._reconnect()
            try:
                return await work(self._connection)
            except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                tries += 1  # another process inserted the same record at the same time
                if tries >= 100:
                    raise
            except asyncpg.QueryCanceledError:  # by an administrator, or the statement timeout
                cancelled += 1
                if cancelled > MAX_CANCELLED:
                    raise
            except Exception as error:  # if the connection is lost, the outcome of the statement is unknown
                if not is_lost(self._connection, error):
                    raise
                self._connection.terminate()
                deadline = deadline or time.monotonic() + self._server.reconnect_s
                if time.monotonic() > deadline:  # each new connection is lost, too, or never answers this statement
                    raise

    def _note_published(self, position: int) -> None:
        if position - self._newest > KEPT_EVENTS:  # we may have missed events that were deleted
            self._must_look = True
        else:
            self._newest = max(self._newest, position)
            self._up_to_date_at = self._server.clock.now()
        if self._unannounced is None:
            self._unannounced_since = time.monotonic()
        self._unannounced = position

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
            if position % _PRUNE_EVERY == 0:
                await self._connection.execute(_PRUNE, position - KEPT_EVENTS)
        except Exception as error:  # isolation point: the writer must go on
            logger.debug("cannot wake other processes, which poll for events anyway: %s", error)
            drop_if_lost(self._connection, error)

    def _publish_new(self, horizon: int, events: str | None, *, is_new: bool = True) -> None:
        """Publishes new events of other processes; with ``is_new=False``, only marks them as read."""
        for position, xid, origin, text in orjson.loads(events or "[]"):
            if position <= self._seen.get(origin, (0, 0))[0]:
                continue
            self._seen[origin] = position, xid
            if position - self._newest > KEPT_EVENTS:  # as above
                self._must_look = True
            else:
                self._newest = max(self._newest, position)
            try:
                if is_new:
                    self._publish(decode_events(text))
            except ValidationError:  # of a newer version, for example; this process must go on writing
                logger.exception("an event of another process cannot be read and is skipped")
        self._horizon = max(self._horizon, horizon)
        self._seen = {origin: last for origin, last in self._seen.items() if last[1] >= self._horizon}

    async def _read_events(self, horizon: int) -> tuple[int, str | None, int]:
        """Reads the new events; returns the horizon of this read, the events, and the position of the newest event."""
        seen = orjson.dumps({str(origin): position for origin, (position, _) in self._seen.items()}).decode()
        found: tuple[int, str | None, int] = await self._connection.fetchrow(NEW_EVENTS, horizon, self._origin, seen)
        return found

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
            horizon, events, newest = await self._read_events(self._horizon)
            if newest - self._newest > KEPT_EVENTS:  # this process was stopped for so long that some are deleted
                self._publish(await read_missed_events(self._connection, self._up_to_date_at))
            self._publish_new(horizon, events)
            self._newest = max(self._newest, newest)
            self._up_to_date_at = self._server.clock.now()
        except Exception as error:  # isolation point: a server that is away for a while must not end the writer
            drop_if_lost(self._connection, error)
            if self._server.away_since is None:  # else the outage was reported
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
            await connection.execute("SET plan_cache_mode = force_generic_plan")
            self._slot = await connection.fetchval(SLOT)
            await self._server.measure_clock(connection)
            await connection.add_listener("agl", self._notified)
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(lambda _: self._look_soon())
        self._connection = connection

    def _notified(self, connection: object, pid: int, channel: str, payload: object) -> None:
        if payload == MIGRATED:
            self._must_check_schema = True
        if payload != str(self._origin):
            self._look_soon()

    def _look_soon(self) -> None:
        self._must_look = True
        self._wake.set()
