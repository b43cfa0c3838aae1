"""Workers: their records, and the status that follows from their live attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.frozen import FrozenList
from agentlightning.records import UNSET, Attempt, PaginatedResult, Unset, Worker
from agentlightning.store.backend import Condition, Put, Query
from agentlightning.store.condition import make_test, read_field, sort_by
from agentlightning.store.engine.attempts import Attempts
from agentlightning.store.engine.database import LIVE, Database


class Workers:
    """Reads and writes workers.

    A stored worker has what claims and heartbeats wrote. Its status and current attempt are derived from its live
    attempts when it is read. Worker records are written without guards: the next heartbeat corrects a lost update.
    """

    def __init__(self, database: Database, attempts: Attempts, lease_s: float) -> None:
        self._database = database
        self._attempts = attempts
        self._lease_s = lease_s

    async def query(self, query: Query[Worker]) -> PaginatedResult[Worker]:
        """Runs a query here instead of in the database, which does not have the current status."""
        live: dict[str | None, list[Attempt]] = {}
        rows = await self._database.rows(Query(Worker))
        # By worker, because databases index live attempts by their worker.
        theirs = Condition("worker_id", "in", tuple(row.record.worker_id for row in rows))
        for attempt in await self._database.rows(Query(Attempt, (theirs, LIVE))):
            live.setdefault(attempt.record.worker_id, []).append(attempt.record)
        workers = [self._describe(row.record, live.get(row.record.worker_id, ())) for row in rows]
        parts = query.where, query.any_of
        where, any_of = ([make_test(each, read_field(each.field)) for each in part] for part in parts)
        found = [
            worker
            for worker in workers
            if all(test(worker) for test in where) and (not any_of or any(test(worker) for test in any_of))
        ]
        if query.sort_by is not None:
            sort_by(found, read_field(query.sort_by), query.descending)
        elif query.descending:
            found.reverse()
        end = None if query.limit < 0 else query.offset + query.limit
        return PaginatedResult(
            items=found[query.offset : end], limit=query.limit, offset=query.offset, total=len(found)
        )

    async def get(self, worker_id: str) -> Worker | None:
        worker = await self._database.record(Worker, worker_id)
        return None if worker is None else self._describe(worker, await self._database.live_attempts(worker_id))

    async def beat(
        self, worker_id: str, changes: Mapping[str, Any], attempt_ids: Sequence[str] | Unset | None
    ) -> Worker:
        """Writes a heartbeat. ``changes`` has valid, frozen values."""
        worker = await self._database.worker(worker_id)
        live = await self._database.live_attempts(worker_id)
        if attempt_ids is UNSET:
            attempt_ids = worker.attempt_ids
        if attempt_ids is not None:
            given = frozenset(attempt_ids)
            attempt_ids = FrozenList(attempt.attempt_id for attempt in live if attempt.attempt_id in given)
        changes = {**changes, "last_heartbeat_time": self._database.now(), "attempt_ids": attempt_ids}
        worker = self._describe(worker.model_copy(update=changes), live)
        await self._database.backend.commit([Put(worker)])
        return worker

    async def end(self, worker_id: str) -> int:
        """Marks a worker as dead and ends its live attempts; returns how many."""
        ended = 0
        while True:
            # A claim or heartbeat at the same moment may overwrite the mark, so it is checked after each round.
            row = await self._database.row(Worker, worker_id)
            if row is not None and row.record.ended_at is None:
                dead = row.record.model_copy(update={"ended_at": self._database.now(), "attempt_ids": None})
                await self._database.backend.commit([Put(dead)])
            live = await self._database.live_attempts(worker_id)
            if not live:
                return ended
            ended += sum([await self._attempts.lose(attempt) for attempt in live])

    def _describe(self, worker: Worker, live: Sequence[Attempt]) -> Worker:
        """Returns a worker with the status that follows from its live attempts.

        It is busy with the newest attempt. Without one it is idle, or unknown if it is dead or its last sign of life is
        older than a lease. A status that is new since the record was written counts from that last sign of life.
        """
        current = max(live, key=lambda attempt: attempt.start_time, default=None)
        seen = worker.last_heartbeat_time
        is_gone = worker.ended_at is not None or self._database.now() - (seen or 0.0) > self._lease_s
        status = "busy" if current is not None else "unknown" if is_gone else "idle"
        changes: dict[str, str | float | None] = {
            "status": status,
            "current_rollout_id": None if current is None else current.rollout_id,
            "current_attempt_id": None if current is None else current.attempt_id,
        }
        if status not in (worker.status, "unknown"):
            changes[f"last_{status}_time"] = seen
        return worker.model_copy(update=changes)
