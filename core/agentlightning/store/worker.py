"""The engine's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.frozen import FrozenList, freeze
from agentlightning.lifecycle import lose_claim
from agentlightning.store.backend import Put, Row
from agentlightning.store.filter import Filter, check_choice, find
from agentlightning.store.transaction import Transactional, now
from agentlightning.store.transition import Change, describe_work, revoked
from agentlightning.types import (
    LIVE_ATTEMPT,
    UNSET,
    Attempt,
    AttemptFailure,
    FilterLogic,
    PaginatedResult,
    Rollout,
    SortOrder,
    Unset,
    Worker,
    WorkerStatus,
)


class WorkerMethods(Transactional):
    """Workers, as their claims, results and heartbeats show them.

    A worker is busy while it has live attempts (``current_*`` name the newest), idle without one, and unknown once its
    lease ran out. These records inform people and renew leases; nothing is decided by ``status``. They are therefore
    written without guards, and what a race between two writers leaves behind is put right by the next heartbeat.
    """

    async def query_workers(
        self,
        *,
        status_in: Sequence[str] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        for status in status_in or ():
            check_choice("status_in", status, get_args(WorkerStatus))
        query = (
            Filter(filter_logic)
            .among(status=status_in)
            .contain(worker_id=worker_id_contains)
            .query(Worker, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset)
        )
        return await find(self._database.backend, query)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        row = await self._row(Worker, worker_id)
        return None if row is None else row.record

    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: Mapping[str, Any] | Unset | None = UNSET,
        attempt_ids: Sequence[str] | Unset | None = UNSET,
    ) -> Worker:
        if not worker_id:
            raise ConfigError("worker_id is empty")
        time = now()
        _, worker = await self._worker_row(worker_id)
        live = await self._live_attempts(worker_id)
        worker = describe_work(worker, live, time)
        changes: dict[str, Any] = {"last_heartbeat_time": time}
        if heartbeat_stats is not UNSET:
            changes["heartbeat_stats"] = freeze(heartbeat_stats, "heartbeat_stats")
        if attempt_ids is UNSET:
            attempt_ids = worker.attempt_ids
        if attempt_ids is not None:
            wanted = frozenset(attempt_ids)
            attempt_ids = FrozenList(attempt.attempt_id for attempt in live if attempt.attempt_id in wanted)
        changes["attempt_ids"] = attempt_ids
        worker = worker.model_copy(update=changes)
        await self._database.backend.commit([Put(worker)])
        return worker

    async def end_worker(self, worker_id: str) -> int:
        """Says that a worker is dead: it gets no more work, and its live attempts end now.

        It is recorded as unknown. One that lives after all finds its results kept as late ones.
        """
        ended = 0
        while True:
            # What others write of a worker at the same moment may undo the note, so it is looked for after each round.
            row, worker = await self._worker_row(worker_id)
            if row is not None and worker.ended_at is None:
                worker = describe_work(worker.model_copy(update={"ended_at": now(), "attempt_ids": None}), (), now())
                await self._database.backend.commit([Put(worker)])
            live = await self._live_attempts(worker_id)
            if not live:
                return ended
            ended += sum([await self._lose(attempt) for attempt in live])

    async def _lose(self, attempt: Attempt) -> bool:
        """Ends an attempt of a dead worker; False if it has ended meanwhile."""
        error = AttemptFailure(type="Unresponsive", message=f"worker {attempt.worker_id!r} was reported dead")

        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[bool]:
            if row.record.status not in LIVE_ATTEMPT or row.record.worker_id != attempt.worker_id:
                return Change(False)
            time = now()
            change = Change(True)
            outcome = lose_claim(rollout.record, row.record, time, error)
            change.step(rollout, row, outcome, time)
            change.events.append(revoked(rollout.record, outcome.attempt, time))
            return change

        try:
            return await self._step(attempt.rollout_id, attempt.attempt_id, plan)
        except NotFoundError:  # deleted meanwhile
            return False
