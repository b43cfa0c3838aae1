"""The engine's queue: how rollouts come in and how workers take them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.event import Event, RolloutEnqueued
from agentlightning.lifecycle import begin_attempt
from agentlightning.store.backend import Condition, Put, Query, Row, Write
from agentlightning.store.transaction import Transactional, attempted, now
from agentlightning.store.transition import Change, check_employed, started, take_work
from agentlightning.store.waiting import deadline_after
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    TaskInput,
    new_attempt_id,
    new_rollout_id,
)

_DEFAULT_CONFIG: Final = RolloutConfig()


class QueueMethods(Transactional):
    """Enqueueing, claiming, and attempts begun by hand."""

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        request = EnqueueRolloutRequest.make(input, mode, resources_id, config, metadata)
        return (await self.enqueue_many_rollouts([request]))[0]

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Queues rollouts in order, all or none; a known ``rollout_id`` gives the rollout that is there.

        Raises:
            NotFoundError: an unknown ``resources_id``; nothing is queued.
            ConflictError: a known ``rollout_id`` belongs to another run; nothing is queued.
        """
        requests = list(requests)
        chosen = tuple({request.rollout_id for request in requests if request.rollout_id is not None})

        async def plan() -> Change[list[Rollout]]:
            known = await self._known(chosen)
            pinned = await self._pin({request.resources_id for request in requests})
            time = now()
            change: Change[list[Rollout]] = Change([])
            for request in requests:
                rollout = known.get(request.rollout_id) if request.rollout_id is not None else None
                if rollout is None:
                    rollout = self._create(request, pinned, time)
                    if request.rollout_id is None:
                        change.writes.append(Put(rollout))
                    else:
                        known[request.rollout_id] = rollout
                        change.insert(rollout)
                    change.events.append(RolloutEnqueued(run_id=self.run_id, time=time, rollout_id=rollout.rollout_id))
                change.result.append(rollout)
            return change

        return await self._commit(plan)

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        request = EnqueueRolloutRequest.make(input, mode, resources_id, config, metadata)

        async def plan() -> Change[AttemptedRollout]:
            pinned = await self._pin({resources_id})
            time = now()
            outcome = begin_attempt(self._create(request, pinned, time), new_attempt_id(), 1, time, worker_id)
            change = Change(attempted(outcome.rollout, outcome.attempt))
            change.writes += [Put(outcome.rollout), Put(outcome.attempt)]
            change.events.append(started(outcome, time))
            if worker_id is not None:
                _, worker = await self._worker_row(worker_id)
                change.writes.append(Put(take_work(worker, outcome.attempt, time)))
            return change

        begun = await self._commit(plan)
        self._database.expect([begun])
        return begun

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        async def plan() -> Change[AttemptedRollout]:
            rollout = await self._rollout(rollout_id)
            latest = await self._latest_attempt(rollout_id)
            time = now()
            sequence_id = 1 if latest is None else latest.record.sequence_id + 1
            outcome = begin_attempt(rollout.record, new_attempt_id(), sequence_id, time, worker_id)
            change = Change(attempted(outcome.rollout, outcome.attempt))
            change.step(rollout, None, outcome, time)
            if worker_id is not None:
                _, worker = await self._worker_row(worker_id)
                change.writes.append(Put(take_work(worker, outcome.attempt, time)))
            return change

        begun = await self._commit(plan)
        self._database.expect([begun])
        return begun

    async def dequeue_rollout(self, worker_id: str | None = None, *, timeout: float = 0) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id, timeout=timeout)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0
    ) -> Sequence[AttemptedRollout]:
        """Takes up to ``limit`` queued rollouts; waits up to ``timeout`` for the first.

        A caller that is cancelled loses nothing: what was being claimed for it goes back to the queue. Closing the
        store ends the wait with an empty result.
        """
        if limit < 0:
            raise ConfigError(f"limit={limit}; it can be 0 or more")
        deadline = deadline_after(timeout)
        if limit == 0:
            return []
        claimed = await self._claim(limit, worker_id)
        if claimed or timeout == 0:
            return claimed
        waiters = self._database.waiters
        bell = waiters.join_queue(self.run_id)
        try:
            # The first look after joining closes the gap in which a rollout came and rang for somebody else.
            while not waiters.closed:
                try:
                    claimed = await self._claim(limit, worker_id)
                except BaseException:
                    bell.rung = True  # what rang may still be there: let the next in line look
                    raise
                if claimed or not await bell.wait(deadline):
                    return claimed
                waiters.rejoin_queue(self.run_id, bell)
            return []
        finally:
            waiters.leave_queue(self.run_id, bell)

    async def _claim(self, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        """Claims what is there now. The claim runs to its end in a task of its own even if the caller is cancelled."""
        claim = asyncio.create_task(self._claim_now(limit, worker_id))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._give_back(claim))
            self._database.background.add(task)
            task.add_done_callback(self._database.background.discard)
            raise

    async def _claim_now(self, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        claimed: list[AttemptedRollout] = []
        held: list[tuple[Row[Rollout], Row[Attempt]]] = []
        worker = None if worker_id is None else (await self._worker_row(worker_id))[1]
        if worker is not None:
            check_employed(worker)

        def decide(locked: Sequence[tuple[Row[Rollout], int]]) -> tuple[Sequence[Write], Sequence[Event]]:
            claimed.clear()  # a backend that repeats its transaction decides again
            writes: list[Write] = []
            events: list[Event] = []
            time = now()
            held.clear()
            for row, attempts in locked:
                outcome = begin_attempt(row.record, new_attempt_id(), attempts + 1, time, worker_id)
                writes += [Put(outcome.rollout), Put(outcome.attempt)]
                held.append((Row(outcome.rollout, row.revision + 1), Row(outcome.attempt, 1)))
                events.append(started(outcome, time))
                claimed.append(attempted(outcome.rollout, outcome.attempt))
            if worker is not None and locked:
                writes.append(Put(take_work(worker, outcome.attempt, time)))
            return writes, events

        await self._database.backend.claim(self.run_id, limit, decide)
        for rows in held:
            self._database.hold(*rows)
        self._database.expect(claimed)
        return claimed

    async def _give_back(self, claim: asyncio.Future[list[AttemptedRollout]]) -> None:
        """Returns what was claimed for a caller that is gone."""
        await asyncio.wait([claim])
        if claim.cancelled() or claim.exception() is not None:  # nothing was claimed, and who would be told is gone
            return
        for item in claim.result():
            with contextlib.suppress(NotFoundError, ConflictError):  # somebody else has taken care of it
                await self.release_attempt(item.rollout_id, item.attempt.attempt_id)

    async def _known(self, rollout_ids: Collection[str]) -> dict[str, Rollout]:
        if not rollout_ids:
            return {}
        rows = await self._rows(Query(Rollout, (Condition("rollout_id", "in", tuple(rollout_ids)),)))
        for row in rows:
            if row.record.run_id != self.run_id:
                raise ConflictError(
                    f"rollout {row.record.rollout_id!r} belongs to run {row.record.run_id!r} and cannot be queued in "
                    f"run {self.run_id!r}; choose another rollout_id"
                )
        return {row.record.rollout_id: row.record for row in rows}

    async def _pin(self, wanted: Collection[str | None]) -> dict[str | None, str | None]:
        """What each wanted ``resources_id`` means: None is the run's newest snapshot, ``rs-1@3`` is one version.

        Raises:
            NotFoundError: an unknown id.
        """
        pinned: dict[str | None, str | None] = {}
        for resources_id in wanted:
            if resources_id is None:
                latest = await self.get_latest_resources()
                pinned[None] = None if latest is None else latest.resources_id
            elif await self.get_resources_by_id(resources_id) is not None:
                pinned[resources_id] = resources_id
            else:
                raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")
        return pinned

    def _create(self, request: EnqueueRolloutRequest, pinned: Mapping[str | None, str | None], time: float) -> Rollout:
        """The rollout that a request asks for; the request was validated and frozen when it was made."""
        return Rollout.from_valid(
            {
                "rollout_id": request.rollout_id or new_rollout_id(),
                "input": request.input,
                "start_time": time,
                "end_time": None,
                "mode": request.mode,
                "resources_id": pinned[request.resources_id],
                "status": "queuing",
                "config": request.config or _DEFAULT_CONFIG,
                "metadata": request.metadata,
                "run_id": self.run_id,
            }
        )
