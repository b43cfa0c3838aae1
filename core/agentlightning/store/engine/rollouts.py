"""Changes and deletes rollouts, and waits for their ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.records import (
    ENDED_ROLLOUT,
    LIVE_ATTEMPT,
    UNSET,
    Attempt,
    AttemptFailure,
    Rollout,
    RolloutStatus,
    Unset,
)
from agentlightning.store.backend import Condition, Query
from agentlightning.store.engine.change import Change, rollout_events
from agentlightning.store.engine.database import Database, is_in
from agentlightning.store.lifecycle import Outcome, move_attempt, move_rollout, retry
from agentlightning.store.waiting import Countdown, Waiters

_RUNNING: Final = frozenset({"preparing", "running"})


class Rollouts:
    """Changes rollouts that are stored."""

    def __init__(self, database: Database, waiters: Waiters) -> None:
        self._database = database
        self._waiters = waiters

    async def update(self, rollout_id: str, status: RolloutStatus | Unset, changes: Mapping[str, Any]) -> Rollout:
        """Sets the status and other fields. ``changes`` has valid, frozen values."""

        def transition(rollout: Rollout, now: float) -> Rollout:
            changed = rollout.model_copy(update=changes) if changes else rollout
            return changed if status is UNSET else move_rollout(changed, status, now)

        return await self._change(rollout_id, transition)

    async def retry(self, rollout_id: str) -> Rollout:
        return await self._change(rollout_id, lambda rollout, _: retry(rollout))

    async def _change(self, rollout_id: str, transition: Callable[[Rollout, float], Rollout]) -> Rollout:
        """Applies a transition. If it ends or requeues the rollout, the rollout's live attempt ends too."""

        async def plan() -> Change[Rollout]:
            row = await self._database.rollout(rollout_id)
            now = self._database.now()
            before, after = row.record, transition(row.record, now)
            change = Change(after)
            if after is before:
                return change
            attempt = None
            if before.status in _RUNNING and after.status not in _RUNNING:
                attempt = await self._database.latest_attempt(rollout_id)
            if attempt is not None and attempt.record.status in LIVE_ATTEMPT:
                change.revoke(row, attempt, _end_attempt(after, attempt.record, now), now)
            else:
                change.replace(row, after)
                change.events += rollout_events(before, after, now)
            return change

        return (await self._database.with_attempts([await self._database.commit(plan)]))[0]

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """Deletes rollouts by id, all or none; raises ConflictError if one of them has not ended."""
        wanted = tuple(dict.fromkeys(rollout_ids))

        async def plan() -> Change[int]:
            rows = await self._database.rows(Query(Rollout, (Condition("rollout_id", "in", wanted),)))
            change = Change(len(rows))
            for row in rows:
                if row.record.status not in ENDED_ROLLOUT:
                    raise ConflictError(
                        f"rollout {row.record.rollout_id} is {row.record.status}; only rollouts that have ended can be "
                        "deleted (cancel it first); nothing was deleted"
                    )
                change.remove(row)
            return change

        return await self._database.commit(plan)

    async def wait(self, rollout_ids: Sequence[str], deadline: float) -> Sequence[Rollout]:
        """Returns the rollouts that ended by ``deadline`` (``time.monotonic()``), in the given order."""
        ids = list(dict.fromkeys(rollout_ids))
        found = await self._find(ids)
        missing = [rollout_id for rollout_id in ids if rollout_id not in found]
        if missing:
            raise NotFoundError(f"no rollouts {', '.join(map(repr, missing[:5]))} in this store")
        while not self._waiters.closed and time.monotonic() < deadline:
            pending = [rollout_id for rollout_id, rollout in found.items() if rollout.status not in ENDED_ROLLOUT]
            if not pending:
                break
            countdown = Countdown(pending)
            self._waiters.add(countdown)
            try:
                # Read again: the countdown misses rollouts that ended before it was added. A deleted rollout has ended.
                again = await self._find(pending)
                open_ = {id_ for id_, rollout in again.items() if rollout.status not in ENDED_ROLLOUT}
                self._waiters.discard(countdown, [id_ for id_ in pending if id_ not in open_])
                if countdown.pending:
                    await countdown.wait(deadline)
            finally:
                self._waiters.discard(countdown, pending)
            found = await self._find(ids)  # without the rollouts that were deleted after their end
        ended = [rollout for rollout in found.values() if rollout.status in ENDED_ROLLOUT]
        by_id = {rollout.rollout_id: rollout for rollout in await self._database.with_attempts(ended)}
        return [by_id[rollout_id] for rollout_id in rollout_ids if rollout_id in by_id]

    async def _find(self, rollout_ids: Sequence[str]) -> dict[str, Rollout]:
        rows = await self._database.rows(Query(Rollout, (is_in("rollout_id", rollout_ids),)))
        return {row.record.rollout_id: row.record for row in rows}


def _end_attempt(rollout: Rollout, attempt: Attempt, now: float) -> Outcome:
    """Ends the live attempt of a rollout that was ended or queued again."""
    if rollout.status == "succeeded":
        return move_attempt(rollout, attempt, "succeeded", now)
    message = f"the rollout was set to {rollout.status} during this attempt"
    error = AttemptFailure(type=rollout.status.capitalize(), message=message)
    return move_attempt(rollout, attempt, "failed", now, error=error)
