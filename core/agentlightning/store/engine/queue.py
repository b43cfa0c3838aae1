"""The queue: enqueues, claims and starts rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.event import Event, RolloutEnqueued
from agentlightning.records import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    new_attempt_id,
    new_rollout_id,
)
from agentlightning.store.backend import Condition, Put, Query, Row, Write
from agentlightning.store.engine.attempts import Attempts
from agentlightning.store.engine.change import Change, make_event, rollout_started
from agentlightning.store.engine.database import Database, join
from agentlightning.store.engine.watchdog import Watchdog
from agentlightning.store.lifecycle import assign_work, begin_attempt
from agentlightning.store.waiting import Waiters

_DEFAULT_CONFIG: Final = RolloutConfig()


class Queue:
    """Puts rollouts into the queues of runs and takes them out."""

    def __init__(self, database: Database, waiters: Waiters, attempts: Attempts, watchdog: Watchdog) -> None:
        self._database = database
        self._waiters = waiters
        self._attempts = attempts
        self._watchdog = watchdog
        self.background: set[asyncio.Task[None]] = set()
        """Tasks that outlive their caller; referenced here because a loop holds its tasks weakly."""

    async def enqueue(self, run_id: str, requests: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        requests = list(requests)
        chosen = {request.rollout_id for request in requests if request.rollout_id is not None}

        async def plan() -> Change[list[Rollout]]:
            known = await self._find_known(run_id, chosen)
            pinned = await self._pin_resources(run_id, {request.resources_id for request in requests})
            now = self._database.now()
            change: Change[list[Rollout]] = Change([])
            for request in requests:
                rollout = known.get(request.rollout_id) if request.rollout_id is not None else None
                if rollout is None:
                    rollout = _make_rollout(run_id, request, pinned, now)
                    if request.rollout_id is None:
                        change.writes.append(Put(rollout))
                    else:
                        known[request.rollout_id] = rollout
                        change.insert(rollout)
                    change.events.append(make_event(RolloutEnqueued, rollout, now))
                change.result.append(rollout)
            return change

        return await self._database.commit(plan)

    async def start(self, run_id: str, request: EnqueueRolloutRequest, worker_id: str | None) -> AttemptedRollout:
        """Creates a rollout with its first attempt."""

        async def plan() -> Change[AttemptedRollout]:
            pinned = await self._pin_resources(run_id, {request.resources_id})
            return await self._begin(None, _make_rollout(run_id, request, pinned, self._database.now()), 1, worker_id)

        self._watchdog.start()
        return await self._database.commit(plan)

    async def start_attempt(self, rollout_id: str, worker_id: str | None) -> AttemptedRollout:
        """Begins the next attempt of a rollout."""

        async def plan() -> Change[AttemptedRollout]:
            rollout = await self._database.rollout(rollout_id)
            latest = await self._database.latest_attempt(rollout_id)
            sequence_id = 1 if latest is None else latest.record.sequence_id + 1
            return await self._begin(rollout, rollout.record, sequence_id, worker_id)

        self._watchdog.start()
        return await self._database.commit(plan)

    async def claim(self, run_id: str, limit: int, worker_id: str | None, deadline: float) -> list[AttemptedRollout]:
        """Claims up to ``limit`` queued rollouts, waiting for the first until ``deadline`` (``time.monotonic()``)."""
        claimed = await self._claim(run_id, limit, worker_id)
        if claimed or time.monotonic() >= deadline:
            return claimed
        signal = self._waiters.join_queue(run_id)
        try:
            # The first claim after joining finds a rollout that was enqueued just before.
            while not self._waiters.closed:
                try:
                    claimed = await self._claim(run_id, limit, worker_id)
                except BaseException:
                    signal.is_set = True  # there may be a rollout: let the next in line claim it
                    raise
                if claimed or not await signal.wait(deadline):
                    return claimed
                self._waiters.rejoin_queue(run_id, signal)
            return []
        finally:
            self._waiters.leave_queue(run_id, signal)

    async def _claim(self, run_id: str, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        """Claims in a task that runs to its end even if the caller is cancelled."""
        claim = asyncio.create_task(self.claim_now(run_id, limit, worker_id))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._release(claim))
            self.background.add(task)
            task.add_done_callback(self.background.discard)
            raise

    async def claim_now(self, run_id: str, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        """Claims rollouts that are in the queue now, without waiting."""
        worker = (
            None if worker_id is None else assign_work(await self._database.worker(worker_id), self._database.now())
        )
        begun: list[tuple[Row[Rollout], Row[Attempt]]] = []

        def decide(locked: Sequence[tuple[Row[Rollout], int]]) -> tuple[Sequence[Write], Sequence[Event]]:
            nonlocal begun
            now = self._database.now()
            outcomes = [
                begin_attempt(row.record, new_attempt_id(), attempts + 1, now, worker_id) for row, attempts in locked
            ]
            begun = [
                (Row(outcome.rollout, row.revision + 1), Row(outcome.attempt, 1))
                for outcome, (row, _) in zip(outcomes, locked, strict=True)
            ]
            writes: list[Write] = [Put(record) for outcome in outcomes for record in outcome]
            if worker is not None and locked:
                writes.append(Put(worker))
            return writes, [rollout_started(outcome, now) for outcome in outcomes]

        if not await self._database.backend.claim(run_id, limit, decide):
            return []  # ``decide`` may still have run, in a transaction that was undone
        for rollout, attempt in begun:
            self._database.cache(rollout, attempt)
        self._watchdog.start()
        return [join(rollout.record, attempt.record) for rollout, attempt in begun]

    async def _release(self, claim: asyncio.Future[list[AttemptedRollout]]) -> None:
        """Puts rollouts that were claimed for a cancelled caller back into the queue."""
        await asyncio.wait([claim])
        if claim.cancelled() or claim.exception() is not None:  # nothing was claimed
            return
        for item in claim.result():
            with contextlib.suppress(NotFoundError, ConflictError):  # it has ended, or was deleted
                await self._attempts.release(item.rollout_id, item.attempt.attempt_id)

    async def _begin(
        self, row: Row[Rollout] | None, rollout: Rollout, sequence_id: int, worker_id: str | None
    ) -> Change[AttemptedRollout]:
        now = self._database.now()
        outcome = begin_attempt(rollout, new_attempt_id(), sequence_id, now, worker_id)
        change = Change(join(*outcome), events=[rollout_started(outcome, now)])
        if row is None:
            change.writes.append(Put(outcome.rollout))
        else:
            change.replace(row, outcome.rollout)
        change.writes.append(Put(outcome.attempt))
        if worker_id is not None:
            change.writes.append(Put(assign_work(await self._database.worker(worker_id), now)))
        return change

    async def _find_known(self, run_id: str, rollout_ids: Collection[str]) -> dict[str, Rollout]:
        if not rollout_ids:
            return {}
        rows = await self._database.rows(Query(Rollout, (Condition("rollout_id", "in", tuple(rollout_ids)),)))
        for row in rows:
            if row.record.run_id != run_id:
                raise ConflictError(
                    f"rollout {row.record.rollout_id!r} belongs to run {row.record.run_id!r} and cannot be queued in "
                    f"run {run_id!r}; choose another rollout_id"
                )
        return {row.record.rollout_id: row.record for row in rows}

    async def _pin_resources(self, run_id: str, wanted: Collection[str | None]) -> dict[str | None, str | None]:
        """Maps each ``resources_id`` to the id to store, None to the run's newest; NotFoundError if one is unknown."""
        pinned: dict[str | None, str | None] = {}
        for resources_id in wanted:
            if resources_id is not None:
                await self._database.check_resources(resources_id)
                pinned[resources_id] = resources_id
            else:
                latest = await self._database.newest_resources(run_id=run_id)
                pinned[None] = None if latest is None else latest.resources_id
        return pinned


def _make_rollout(
    run_id: str, request: EnqueueRolloutRequest, pinned: Mapping[str | None, str | None], now: float
) -> Rollout:
    """Makes the rollout of a request, which was validated and frozen when it was made."""
    return Rollout.from_valid(
        {
            "rollout_id": request.rollout_id or new_rollout_id(),
            "input": request.input,
            "start_time": now,
            "end_time": None,
            "mode": request.mode,
            "resources_id": pinned[request.resources_id],
            "status": "queuing",
            "config": request.config or _DEFAULT_CONFIG,
            "metadata": request.metadata,
            "run_id": run_id,
            "priority": request.priority,
        }
    )
