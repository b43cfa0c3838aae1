"""The engine's attempts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from agentlightning.frozen import freeze
from agentlightning.lifecycle import Outcome, move_attempt, release
from agentlightning.store.backend import Put, Row
from agentlightning.store.filter import Filter, check_choice, find
from agentlightning.store.transaction import Transactional, attempted, now
from agentlightning.store.transition import Change, take_work
from agentlightning.types import (
    LIVE_ATTEMPT,
    UNSET,
    Attempt,
    AttemptFailure,
    AttemptStatus,
    PaginatedResult,
    Rollout,
    SortOrder,
    Unset,
)

_STATUSES: Final[tuple[AttemptStatus, ...]] = get_args(AttemptStatus)


class AttemptMethods(Transactional):
    """Reading attempts, and the reports of those who run them."""

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        row = await self._latest_attempt(rollout_id)
        return None if row is None else row.record

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        query = (
            Filter()
            .scope(rollout_id=rollout_id)
            .query(Attempt, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset)
        )
        return await find(self._database.backend, query)

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: Mapping[str, Any] | Unset | None = UNSET,
        *,
        error: AttemptFailure | Unset | None = UNSET,
        spans_dropped: int | Unset = UNSET,
        reward: float | Unset | None = UNSET,
    ) -> Attempt:
        """Changes what is given; the status of the latest attempt drives the rollout.

        An ended attempt keeps its status: a later result goes to ``late_status``, and an error that comes with it is
        kept only where the attempt has none. Giving a live attempt another worker moves its lease to that worker.

        Raises:
            NotFoundError: an unknown rollout or attempt.
            ConflictError: the lifecycle refuses the status; nothing was changed.
        """
        if status is not UNSET:
            check_choice("status", status, _STATUSES)
        changes: dict[str, Any] = {
            name: value
            for name, value in {
                "worker_id": worker_id,
                "last_heartbeat_time": last_heartbeat_time,
                "metadata": freeze(metadata, "metadata") if metadata is not UNSET else UNSET,
                "error": error,
                "spans_dropped": spans_dropped,
                "reward": reward,
            }.items()
            if value is not UNSET
        }

        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[Attempt]:
            before, time = row.record, now()
            outcome = Outcome(rollout.record, before)
            is_live = before.status in LIVE_ATTEMPT
            if status is not UNSET:
                outcome = move_attempt(rollout.record, before, status, time)
            wanted = dict(changes)
            if status is not UNSET and not is_live and before.error is not None:
                wanted.pop("error", None)
            if any(getattr(outcome.attempt, name) != value for name, value in wanted.items()):
                outcome = Outcome(outcome.rollout, outcome.attempt.model_copy(update=wanted))
            change = Change(outcome.attempt)
            if outcome.attempt is before:
                return change
            change.step(rollout, row, outcome, time)
            await self._tell_workers(change, before, outcome.attempt, time)
            return change

        ends = status is not UNSET and status not in LIVE_ATTEMPT
        return await self._step(rollout_id, attempt_id, plan, beats=ends)

    async def release_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[Rollout]:
            before, time = row.record, now()
            outcome = release(rollout.record, before, time)
            change: Change[Rollout] = Change(attempted(outcome.rollout, outcome.attempt))
            if outcome.attempt is not before:
                change.step(rollout, row, outcome, time)
                await self._tell_workers(change, before, outcome.attempt, time)
            return change

        return await self._step(rollout_id, attempt_id, plan)

    async def _tell_workers(self, change: Change[Any], before: Attempt, after: Attempt, time: float) -> None:
        """Writes what the change of an attempt means for the worker that had it and the one that has it now."""
        was_live, is_live = before.status in LIVE_ATTEMPT, after.status in LIVE_ATTEMPT
        moved = before.worker_id != after.worker_id
        if was_live and (moved or not is_live):
            worker = await self._worker_after(before, time)
            if worker is not None:
                change.writes.append(Put(worker))
        if is_live and after.worker_id is not None and moved:
            _, taker = await self._worker_row(after.worker_id)
            change.writes.append(Put(take_work(taker, after, time)))
