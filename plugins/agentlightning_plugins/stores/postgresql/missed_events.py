"""Events that were deleted before this process read them, reconstructed from the records."""

from __future__ import annotations

import logging
from typing import Any, Final

import asyncpg

from agentlightning.event import Event, RolloutEnqueued, RolloutFinished
from agentlightning.types import Rollout
from agentlightning_plugins.stores.sql.document import decode

logger = logging.getLogger("agentlightning")

_SLACK_S: Final = 60.0
"""How far the event times of other processes may lag behind."""
_WAITING: Final = "SELECT run_id, rollout_id FROM agl.rollout WHERE queue_position IS NOT NULL"
_ENDED: Final = "SELECT record FROM agl.rollout WHERE status IN ('succeeded', 'failed', 'cancelled')"


async def read_missed_events(connection: asyncpg.Connection, since: float) -> list[Event]:
    """Returns events for the current queue and for the rollouts that ended since a time (Unix time of the server).

    Some of these events were published before, which wakes waiters needlessly but does no harm.
    """
    logger.warning("this process was away for so long that it missed events of the store; it catches up now")
    found: list[Event] = []
    async with connection.transaction():
        async for run_id, rollout_id in connection.cursor(_WAITING, prefetch=1000):
            found.append(RolloutEnqueued(run_id=run_id, rollout_id=rollout_id))
        async for (record,) in connection.cursor(_ENDED, prefetch=1000):
            rollout = decode(Rollout, record)
            if rollout.end_time is None or rollout.end_time < since - _SLACK_S:
                continue
            ended: dict[str, Any] = {"status": rollout.status, "mode": rollout.mode, "time": rollout.end_time}
            found.append(RolloutFinished(run_id=rollout.run_id, rollout_id=rollout.rollout_id, **ended))
    return found
