"""Reads the events of other processes that have the same file open."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from typing import Final

from pydantic import ValidationError

from agentlightning.event import Event, RolloutEnqueued, RolloutFinished
from agentlightning_plugins.stores.shared.sql.document import decode_events

_NEW: Final = "SELECT position, origin, events FROM event WHERE position > ? ORDER BY position"
_NEWEST: Final = "SELECT coalesce(max(position), 0) FROM event"
_OLDEST: Final = "SELECT coalesce(min(position), 0) FROM event"
_WAITING: Final = "SELECT run_id, rollout_id FROM rollout WHERE queue_position IS NOT NULL"
_ENDED: Final = (
    "SELECT run_id, rollout_id, status, json_extract(record, '$.mode'), json_extract(record, '$.end_time') "
    "FROM rollout WHERE json_extract(record, '$.end_time') >= ?"
)
_SLACK_S: Final = 60.0
"""How far the clocks of other processes may lag behind ours."""

logger = logging.getLogger("agentlightning")


class EventReader:
    """Reads events of other processes, each once and in commit order, in the thread that owns the connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.origin = int.from_bytes(os.urandom(7))
        """Distinguishes our events from those of other processes."""
        self._execute = connection.execute
        self._version = self._data_version()
        self.has_moved = False
        """Whether other processes had written at the last ``read``."""
        self._position: int = self._execute(_NEWEST).fetchone()[0]
        self._up_to_date_at = time.time()

    def read(self) -> list[list[Event]]:
        """Returns the events that others committed since the last call, a list for each transaction.

        If there are none, the call costs one read of shared memory.
        """
        version = self._data_version()
        self.has_moved = version != self._version
        if not self.has_moved:
            return []
        commits: list[list[Event]] = []
        oldest = self._execute(_OLDEST).fetchone()[0]
        if oldest > self._position + 1:  # this process was stopped for so long that some are deleted
            commits.append(list(self._reconstruct()))
        for position, origin, text in self._execute(_NEW, (self._position,)).fetchall():
            if origin != self.origin:
                try:
                    commits.append(decode_events(text))
                except ValidationError:  # of a newer version, say; it must not keep this process from writing
                    logger.exception("an event of another process cannot be read and is skipped")
            self._position = position
        self._version = version
        self._up_to_date_at = time.time()
        return commits

    def skip(self, position: int) -> None:
        """Skips this process's own events; all earlier events were read in the same transaction."""
        self._position = position

    def _reconstruct(self) -> Iterable[Event]:
        """Replaces deleted events: yields events for the current queue and for the rollouts that ended since.

        Some of these events were published before, which wakes waiters needlessly but does no harm.
        """
        logger.warning("this process was away for so long that it missed events of the store; it catches up now")
        for run_id, rollout_id in self._execute(_WAITING):
            yield RolloutEnqueued(run_id=run_id, rollout_id=rollout_id)
        for run_id, rollout_id, status, mode, end_time in self._execute(_ENDED, (self._up_to_date_at - _SLACK_S,)):
            yield RolloutFinished(run_id=run_id, time=end_time, rollout_id=rollout_id, status=status, mode=mode)

    def _data_version(self) -> int:
        """Returns a number that changes with every commit of another connection, but not with ours."""
        version: int = self._execute("PRAGMA data_version").fetchone()[0]
        return version
