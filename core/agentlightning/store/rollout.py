"""The engine's rollouts: reading, changing, cancelling, retrying, deleting, waiting."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.frozen import freeze
from agentlightning.lifecycle import move_attempt, move_rollout, retry
from agentlightning.store.backend import Condition, Put, Query
from agentlightning.store.filter import Filter, check_choice, find
from agentlightning.store.retention import delete_ended
from agentlightning.store.transaction import Transactional, among, now
from agentlightning.store.transition import Change, events_between, revoked, rollout_events
from agentlightning.store.waiting import Countdown, deadline_after
from agentlightning.types import (
    ENDED_ROLLOUT,
    LIVE_ATTEMPT,
    UNSET,
    AttemptFailure,
    AttemptStatus,
    FilterLogic,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    TaskInput,
    Unset,
)

_AT_WORK: Final = frozenset({"preparing", "running"})
_STATUSES: Final[tuple[RolloutStatus, ...]] = get_args(RolloutStatus)


class RolloutMethods(Transactional):
    """What is asked of rollouts once they are there."""

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        metadata: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        start_after: float | None = None,
        start_before: float | None = None,
        cursor: str | None = None,
    ) -> PaginatedResult[Rollout]:
        """Finds rollouts of this run (or ``run_id``); items are AttemptedRollout where an attempt exists.

        ``filter_logic`` joins the filters on status and id; run, metadata and times must hold in any case. Sorts by any
        field of Rollout, None first.
        """
        for status in status_in or ():
            check_choice("status_in", status, _STATUSES)
        tests = (
            Filter(filter_logic)
            .scope(run_id=run_id if run_id is not None else self.run_id)
            .having("metadata", metadata)
            .between("start_time", start_after, start_before)
            .among(status=status_in, rollout_id=rollout_id_in)
            .contain(rollout_id=rollout_id_contains)
        )
        query = tests.query(Rollout, sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset, cursor=cursor)
        page = await find(self._database.backend, query, cursor)
        return page.model_copy(update={"items": await self._with_attempts(page.items)})

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        row = await self._row(Rollout, rollout_id)
        return None if row is None else (await self._with_attempts([row.record]))[0]

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: Mapping[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Changes what is given. A status that ends the rollout or queues it again ends its live attempt too."""
        changes: dict[str, Any] = {
            name: value
            for name, value in {
                "input": freeze(input, "input") if input is not UNSET else UNSET,
                "mode": mode,
                "resources_id": resources_id,
                "config": config,
                "metadata": freeze(metadata, "metadata") if metadata is not UNSET else UNSET,
            }.items()
            if value is not UNSET
        }
        if status is not UNSET:
            check_choice("status", status, _STATUSES)
        if isinstance(resources_id, str) and await self.get_resources_by_id(resources_id) is None:
            raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")
        return await self._move(rollout_id, changes, status)

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Ends a rollout that has not finished; a runner at work on it stops its agent.

        The live attempt ends as failed with an error of type ``Cancelled``. Cancelling twice is harmless.

        Raises:
            ConflictError: the rollout has succeeded or failed.
        """
        return await self._move(rollout_id, {}, "cancelled")

    async def retry_rollout(self, rollout_id: str) -> Rollout:
        async def plan() -> Change[Rollout]:
            rollout = await self._rollout(rollout_id)
            after = retry(rollout.record)
            change = Change(after)
            change.replace(rollout, after)
            change.events += rollout_events(rollout.record, after, now())
            return change

        return (await self._with_attempts([await self._commit(plan)]))[0]

    async def delete_rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        ended_before: float | None = None,
        keep: int | None = None,
    ) -> int:
        others = {"status_in": status_in, "ended_before": ended_before, "keep": keep}
        given = [name for name, value in others.items() if value is not None]
        if (rollout_ids is None) != bool(given):
            raise ConfigError(
                "delete_rollouts: give rollout_ids, or else some of status_in, ended_before and keep"
                + (f", not rollout_ids with {' and '.join(given)}" if given else "")
            )
        if rollout_ids is not None:
            return await self._delete(rollout_ids)
        return await delete_ended(
            self._database.backend, self.run_id, status_in=status_in, ended_before=ended_before, keep=keep
        )

    async def _delete(self, rollout_ids: Sequence[str]) -> int:
        wanted = tuple(dict.fromkeys(rollout_ids))

        async def plan() -> Change[int]:
            rows = await self._rows(Query(Rollout, (Condition("rollout_id", "in", wanted),)))
            change = Change(len(rows))
            for row in rows:
                if row.record.status not in ENDED_ROLLOUT:
                    raise ConflictError(
                        f"rollout {row.record.rollout_id} is {row.record.status}; only rollouts that have ended can be "
                        "deleted (cancel it first); nothing was deleted"
                    )
                change.remove(row)
            return change

        return await self._commit(plan)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """Returns those that ended within ``timeout`` (None: waits for all), in the order asked for.

        An id that was given twice is returned twice. A rollout that was retried while others were still being waited
        for is waited for again. Closing the store ends the wait with those that ended.

        Raises:
            NotFoundError: an id is unknown.
        """
        deadline = deadline_after(timeout)
        ids = tuple(dict.fromkeys(rollout_ids))
        found = await self._find_rollouts(ids)
        missing = [rollout_id for rollout_id in ids if rollout_id not in found]
        if missing:
            raise NotFoundError(f"no rollouts {', '.join(map(repr, missing[:5]))} in this store")
        waiters = self._database.waiters
        while not waiters.closed and time.monotonic() < deadline:
            pending = [rollout_id for rollout_id, rollout in found.items() if rollout.status not in ENDED_ROLLOUT]
            if not pending:
                break
            countdown = Countdown(pending)
            waiters.expect(countdown)
            try:
                # Whatever ended before the countdown began did not count down.
                again = await self._find_rollouts(tuple(pending))
                waiters.settle(countdown, [id_ for id_ in pending if _is_over(again.get(id_))])
                if countdown.pending:
                    await countdown.wait(deadline)
            finally:
                waiters.settle(countdown, pending)
            found = await self._find_rollouts(ids)  # without those that were deleted after their end
        ended = [rollout for rollout in found.values() if rollout.status in ENDED_ROLLOUT]
        by_id = {rollout.rollout_id: rollout for rollout in await self._with_attempts(ended)}
        return [by_id[rollout_id] for rollout_id in rollout_ids if rollout_id in by_id]

    async def _find_rollouts(self, rollout_ids: tuple[str, ...]) -> dict[str, Rollout]:
        rows = await self._rows(Query(Rollout, (among("rollout_id", rollout_ids),)))
        return {row.record.rollout_id: row.record for row in rows}

    async def _move(self, rollout_id: str, changes: Mapping[str, Any], status: RolloutStatus | Unset) -> Rollout:
        async def plan() -> Change[Rollout]:
            row = await self._rollout(rollout_id)
            time = now()
            before = after = row.record
            if changes:
                after = Rollout.model_validate({**dict(before), **changes})
            if status is not UNSET:
                after = move_rollout(after, status, time)
            change = Change(after)
            if after is before:
                return change
            change.replace(row, after)
            change.events += rollout_events(before, after, time)
            if before.status in _AT_WORK and after.status not in _AT_WORK:
                await self._end_attempt(change, after, time)
            return change

        return (await self._with_attempts([await self._commit(plan)]))[0]

    async def _end_attempt(self, change: Change[Rollout], rollout: Rollout, time: float) -> None:
        """Ends the live attempt of a rollout that was taken from it, so that no live attempt is ever without one."""
        attempt = await self._latest_attempt(rollout.rollout_id)
        if attempt is None or attempt.record.status not in LIVE_ATTEMPT:
            return
        status: AttemptStatus = "succeeded" if rollout.status == "succeeded" else "failed"
        error = None
        if status == "failed":
            error = AttemptFailure(
                type=rollout.status.capitalize(), message=f"the rollout was set to {rollout.status} during this attempt"
            )
        outcome = move_attempt(rollout, attempt.record, status, time, error=error)
        change.replace(attempt, outcome.attempt)
        change.events[:0] = [
            *events_between(rollout, attempt.record, outcome, time),
            revoked(rollout, outcome.attempt, time),
        ]
        worker = await self._worker_after(attempt.record, time)
        if worker is not None:
            change.writes.append(Put(worker))


def _is_over(rollout: Rollout | None) -> bool:
    """Whether there is nothing to wait for: it ended, or was deleted, which takes an end."""
    return rollout is None or rollout.status in ENDED_ROLLOUT
