"""Reads the events of other processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import asyncpg
import orjson
from pydantic import ValidationError

from agentlightning.event import Event
from agentlightning_plugins.stores.shared.sql import batch
from agentlightning_plugins.stores.shared.sql.document import decode_events

logger = logging.getLogger("agentlightning")

# An event becomes visible when its transaction commits, which is not the order of positions or transaction ids. Events
# of transactions below the horizon of an earlier snapshot were visible in it. Above the horizon, the events of each
# process become visible in order, so the last event seen of each process determines which ones are new.
_NEW: Final = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS horizon,
    (SELECT json_agg(json_build_array(position, xid, origin, events) ORDER BY position) FROM agl.event
        WHERE xid >= $1 AND origin <> $2 AND position > coalesce(($3::jsonb ->> origin::text)::bigint, 0)
    ) AS events,
    (SELECT coalesce(max(position), 0) FROM agl.event) AS newest"""
TELL: Final = """
INSERT INTO agl.event (xid, origin, events) VALUES (pg_current_xact_id()::text::bigint, $1, $2) RETURNING position"""
PRUNE: Final = "DELETE FROM agl.event WHERE position <= $1"


class EventReader:
    """Reads each event of other processes once, in commit order."""

    def __init__(self, origin: int, publish: Callable[[Sequence[Event]], None]) -> None:
        self._origin = origin
        self._publish = publish
        self._horizon = 0
        """Events of transactions below this id have been read."""
        self._seen: dict[int, tuple[int, int]] = {}
        """The position and transaction id of the last event of each other process that is not below the horizon."""
        self._newest = 0
        """The greatest position of an event that was read or written."""
        self._up_to_date_at = 0.0

    async def open(self, connection: asyncpg.Connection, now: float) -> None:
        """Marks the events so far as read."""
        self._horizon, _, self._newest = await self._fetch(connection, 2**62)
        horizon, events, _ = await self._fetch(connection, self._horizon)
        self._take(horizon, events, is_new=False)
        self._up_to_date_at = now

    async def read(self, connection: asyncpg.Connection, now: float) -> None:
        """Publishes what other processes committed since the last time, before Unix time ``now``."""
        horizon, events, newest = await self._fetch(connection, self._horizon)
        if newest - self._newest > batch.KEPT_EVENTS:  # this process was stopped for so long that some are deleted
            since = self._up_to_date_at - batch.CLOCKS_S
            ended = await connection.fetch(batch.ENDED_SINCE.format("agl.", "$1"), since)
            self._publish(batch.make_missed_events(await connection.fetch(batch.WAITING.format("agl.")), ended))
        self._take(horizon, events)
        self._newest, self._up_to_date_at = max(self._newest, newest), now

    async def _fetch(self, connection: asyncpg.Connection, horizon: int) -> tuple[int, str | None, int]:
        """Returns the horizon of this read, the new events, and the position of the newest event of any process."""
        seen = orjson.dumps({str(origin): position for origin, (position, _) in self._seen.items()}).decode()
        found: tuple[int, str | None, int] = await connection.fetchrow(_NEW, horizon, self._origin, seen)
        return found

    def _take(self, horizon: int, events: str | None, *, is_new: bool = True) -> None:
        for position, xid, origin, text in orjson.loads(events or "[]"):
            self._seen[origin] = position, xid
            try:
                if is_new:
                    self._publish(decode_events(text))
            except ValidationError:  # of a newer version, for example; this process must go on writing
                logger.exception("an event of another process cannot be read and is skipped")
        self._horizon = max(self._horizon, horizon)
        self._seen = {origin: last for origin, last in self._seen.items() if last[1] >= self._horizon}
