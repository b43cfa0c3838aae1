"""The coroutine that writes: concurrent writes share a transaction and an fsync."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import asyncpg
import orjson
from pydantic import ValidationError

from agentlightning.errors import StoreError
from agentlightning.event import Event, RolloutEnqueued, RolloutFinished
from agentlightning.store.backend import Row
from agentlightning.types import Rollout
from agentlightning_plugins.stores.postgresql import operation
from agentlightning_plugins.stores.postgresql.connection import Server, is_lost
from agentlightning_plugins.stores.postgresql.operation import Claiming, Operation
from agentlightning_plugins.stores.postgresql.schema import KEPT_EVENTS
from agentlightning_plugins.stores.sql.batch import Item, settle
from agentlightning_plugins.stores.sql.document import decode, decode_events

logger = logging.getLogger("agentlightning")

Work: TypeAlias = Operation | Claiming

MAX_BATCH: Final = 500
"""No more writes join a transaction of so many, so that the first of them need not wait for long."""
MAX_BATCH_CHARACTERS: Final = 16_000_000
WRITE_TIMEOUT_S: Final = 60.0
"""A server that has not answered a write for this long is taken for gone."""
_SLACK_S: Final = 60.0
"""How far the clocks of those who end a rollout may lag behind ours."""
_WRITE: Final = "SELECT * FROM agl.write($1, $2, $3, $4, $5, $6)"
_CLAIM: Final = "SELECT queue, revision, attempts, record FROM agl.claim($1, $2, $3)"
_RECALL: Final = "SELECT outcome FROM agl.writer WHERE origin = $1 AND batch = $2"
_NEWEST: Final = "SELECT coalesce(max(position), 0) FROM agl.event"
_HEARD: Final = "SELECT position, origin, events FROM agl.event WHERE position > $1 ORDER BY position"
_WAITING: Final = "SELECT run_id, rollout_id FROM agl.rollout WHERE queue_position IS NOT NULL"
_ENDED: Final = "SELECT record FROM agl.rollout WHERE status IN ('succeeded', 'failed', 'cancelled')"
_FORGET: Final = "DELETE FROM agl.writer WHERE seen < now() - interval '7 days'"


class Batch:
    """What several callers want written, and what became of their claims."""

    def __init__(self, number: int, items: Sequence[Item[Work]]) -> None:
        self.number = number
        self.items = items
        self.operations: list[tuple[Item[Work], Operation]] = []
        """Claims come first: their rollouts are locked already."""


class Writer:
    """Writes over one connection, for the event loop that it was opened in."""

    def __init__(self, server: Server, tell: Callable[[Sequence[Event]], None]) -> None:
        """Makes a writer.

        Args:
            server: where to.
            tell: called with the events of each commit, by whomever, in commit order.
        """
        self._server = server
        self._tell = tell
        self._origin = int.from_bytes(os.urandom(7))
        self._connection: asyncpg.Connection
        self._number = 0
        self._heard_until = 0
        self._up_to_date_at = time.time()
        self._items: deque[Item[Work]] = deque()
        self._wake = asyncio.Event()
        self._must_look = False
        self._stopped = False
        self.transactions = 0
        """How many were committed."""

    async def open(self, connection: asyncpg.Connection) -> None:
        """Begins to hear of the commits of others, over a connection that becomes the writer's."""
        await self._listen(connection)
        await connection.execute(_FORGET)
        self._heard_until = await connection.fetchval(_NEWEST)

    def take(self, items: Iterable[Item[Work]]) -> None:
        """Has these written."""
        self._items.extend(items)
        self._wake.set()

    def stop(self) -> None:
        """Ends ``run`` when it has done what was taken."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Writes what is taken until stopped."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._items:
                    await self._write(self._next())
                if self._stopped:
                    return
                if self._must_look:
                    await self._look()
        finally:
            await _close(self._connection)

    def _next(self) -> list[Item[Work]]:
        batch: list[Item[Work]] = []
        size = 0
        while self._items and len(batch) < MAX_BATCH and size < MAX_BATCH_CHARACTERS:
            batch.append(self._items.popleft())
            size += getattr(batch[-1].work, "size", 0)
        return batch

    async def _write(self, items: Sequence[Item[Work]]) -> None:
        """Does all of it in one transaction; if that fails, each in one of its own, so that only the culprit fails."""
        try:
            await self._write_once(items)
        except Exception as error:  # isolation point: whatever it is, this coroutine goes on and every caller is told
            if len(items) > 1 and not self._connection.is_closed():
                for item in items:
                    await self._write([item])
                return
            for item in items:
                item.error = self._explain(error)
        settle(items)

    async def _write_once(self, items: Sequence[Item[Work]]) -> None:
        """Commits once, however often the connection is lost meanwhile."""
        self._number += 1
        batch = Batch(self._number, items)
        while True:
            try:
                if self._connection.is_closed():
                    await self._reconnect()
                    outcome = await self._connection.fetchval(_RECALL, self._origin, batch.number)
                    if outcome is not None:
                        self._conclude(batch, outcome, None)
                        return
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    outcome, heard = await self._transact(batch)
                if outcome is not None:
                    self._conclude(batch, outcome, heard)
                return
            except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
                continue
            except Exception as error:  # whatever it is: if the connection is gone, nothing is known of the write
                if isinstance(error, StoreError) or not is_lost(self._connection, error):
                    raise
                self._connection.terminate()

    async def _transact(self, batch: Batch) -> tuple[str | None, str | None]:
        """Writes, in a transaction; gives the outcome (None: there was nothing to write) and what others did before."""
        connection = self._connection
        claims: list[tuple[Item[Work], Claiming]] = []
        batch.operations = []
        for item in batch.items:
            if isinstance(item.work, Claiming):
                claims.append((item, item.work))
            else:
                batch.operations.append((item, item.work))
        if not claims:
            return await self._send(batch)
        await connection.execute("BEGIN")
        try:
            batch.operations[:0] = await self._claim(claims, [work for _, work in batch.operations])
            sent = await self._send(batch) if batch.operations else (None, None)
            await connection.execute("COMMIT")
        except BaseException:
            if not connection.is_closed():
                await connection.execute("ROLLBACK")
            raise
        return sent

    async def _claim(
        self, claims: Sequence[tuple[Item[Work], Claiming]], others: Sequence[Operation]
    ) -> list[tuple[Item[Work], Operation]]:
        """Locks the heads of queues and asks what claiming them writes."""
        queues: dict[str, list[Claiming]] = {}
        for item, work in claims:
            item.error, item.result = None, []
            work.locked.clear()
            queues.setdefault(work.run_id, []).append(work)
        limits = [sum(work.limit for work in queue) for queue in queues.values()]
        rows = await self._connection.fetch(_CLAIM, operation.rollouts_in(others), list(queues), limits)
        lines = [deque(queue) for queue in queues.values()]
        for number, revision, attempts, record in rows:
            line = lines[number]
            while len(line[0].locked) >= line[0].limit:
                line.popleft()
            line[0].locked.append((Row(decode(Rollout, record), revision), attempts))
        decided: list[tuple[Item[Work], Operation]] = []
        for item, work in claims:
            if not work.locked:
                continue
            try:
                writes, events = work.decide(work.locked)
                decided.append((item, operation.commit(writes, (), events)))
            except Exception as error:  # isolation point: one caller's failure is not the others'
                item.error = error
        return decided

    async def _send(self, batch: Batch) -> tuple[str, str | None]:
        steps, spans = operation.join([work for _, work in batch.operations])
        outcome, heard = await self._connection.fetchrow(
            _WRITE, self._origin, batch.number, self._heard_until, len(batch.operations), steps, spans
        )
        return outcome, heard

    def _conclude(self, batch: Batch, outcome: str, heard: str | None) -> None:
        """Tells the watchers what others did before and what we did, and each caller what came of its part."""
        self.transactions += 1
        fields = orjson.loads(outcome)
        numbers, told = fields["numbers"], fields["told"]
        if heard is not None:
            self._hear([(position, events) for position, events in orjson.loads(heard)])
        elif told is not None and told - self._heard_until > KEPT_EVENTS:
            self._must_look = True
        events: list[Event] = []
        for (item, work), verdict in zip(batch.operations, fields["verdicts"], strict=True):
            mine, numbers = (numbers[: work.numbers], numbers[work.numbers :]) if verdict == "done" else ([], numbers)
            try:
                item.result = work.conclude(verdict, mine)
            except StoreError as error:
                item.error = error
            if isinstance(item.work, Claiming):
                item.result = [row.record for row, _ in item.work.locked]
            if verdict == "done":
                events += work.events
        if events:
            self._tell(events)
        if told is not None:
            self._heard_until = max(self._heard_until, told)
            self._up_to_date_at = time.time()

    def _hear(self, commits: Iterable[tuple[int, str]]) -> None:
        for position, text in commits:
            try:
                self._tell(decode_events(text))
            except ValidationError:  # of a newer version, say; it must not keep this process from writing
                logger.exception("an event of another process cannot be read and is left out")
            self._heard_until = max(self._heard_until, position)

    async def _look(self) -> None:
        """Hears what others committed."""
        self._must_look = False
        try:
            if self._connection.is_closed():
                await self._reconnect()
            newest = await self._connection.fetchval(_NEWEST)
            if newest - self._heard_until > KEPT_EVENTS:  # we were away for so long that some are gone
                await self._reconstruct()
            rows = await self._connection.fetch(_HEARD, self._heard_until)
            self._hear([(position, events) for position, origin, events in rows if origin != self._origin])
            self._heard_until = max(self._heard_until, rows[-1][0] if rows else 0)
            self._up_to_date_at = time.time()
        except Exception as error:  # isolation point: a server that is away for a while must not end the writer
            logger.warning("cannot look for events of other processes, and tries again: %s", self._explain(error))
            asyncio.get_running_loop().call_later(1.0, self._look_soon)

    async def _reconstruct(self) -> None:
        """What waits for an event must hear of what is gone: the queue as it is, and what has ended since.

        Some of it was told before, which wakes somebody for nothing and does no harm.
        """
        logger.warning("this process was away for so long that it missed events of the store; it catches up now")
        found: list[Event] = []
        async with self._connection.transaction():
            async for run_id, rollout_id in self._connection.cursor(_WAITING, prefetch=1000):
                found.append(RolloutEnqueued(run_id=run_id, rollout_id=rollout_id))
            async for (record,) in self._connection.cursor(_ENDED, prefetch=1000):
                rollout = decode(Rollout, record)
                if rollout.end_time is None or rollout.end_time < self._up_to_date_at - _SLACK_S:
                    continue
                ended: dict[str, Any] = {"status": rollout.status, "mode": rollout.mode, "time": rollout.end_time}
                found.append(RolloutFinished(run_id=rollout.run_id, rollout_id=rollout.rollout_id, **ended))
        self._tell(found)

    async def _reconnect(self) -> None:
        await self._listen(await self._server.reconnect())
        self._must_look = True
        self._wake.set()

    async def _listen(self, connection: asyncpg.Connection) -> None:
        await connection.add_listener("agl", self._notified)
        connection.add_termination_listener(lambda _: self._look_soon())
        self._connection = connection

    def _notified(self, connection: object, pid: int, channel: str, payload: object) -> None:
        if payload != str(self._origin):
            self._look_soon()

    def _look_soon(self) -> None:
        self._must_look = True
        self._wake.set()

    def _explain(self, error: Exception) -> Exception:
        is_theirs = isinstance(error, (OSError, asyncpg.PostgresError, asyncpg.InterfaceError))
        return self._server.explain(error) if is_theirs else error


async def _close(connection: asyncpg.Connection) -> None:
    try:
        await connection.close(timeout=2.0)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):  # it is gone already
        connection.terminate()
