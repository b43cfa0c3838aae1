"""Transitions of attempts: reports of workers, first spans, and ends that the store decides."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.records import (
    LIVE_ATTEMPT,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    Rollout,
    Span,
    Unset,
)
from agentlightning.store.backend import Condition, Put, Query, Row
from agentlightning.store.check import check_span
from agentlightning.store.engine.change import Change
from agentlightning.store.engine.database import Database, join
from agentlightning.store.lifecycle import MODEL_ERROR, Outcome, assign_work, lose_claim, move_attempt, release
from agentlightning.store.quota import SpanQuota


class Attempts:
    """Changes attempts and, with them, their rollouts."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._quota = SpanQuota()

    async def update(
        self, rollout_id: str, attempt_id: str, status: AttemptStatus | Unset, changes: Mapping[str, Any]
    ) -> Attempt:
        """Sets the status and other fields. ``changes`` has valid, frozen values."""

        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[Attempt]:
            before, now = row.record, self._database.now()
            outcome = Outcome(rollout.record, before)
            wanted = dict(changes)
            if "spans_dropped" in wanted:  # the runner, the gateway and the server of the store report their own losses
                wanted["spans_dropped"] = max(wanted["spans_dropped"], before.spans_dropped)
            if status is not UNSET:
                failed = (before.metadata or {}).get(MODEL_ERROR) if status == "succeeded" else None
                if failed is not None:  # the agent did not notice: its reward would rate a task that it could not do
                    wanted |= {"error": AttemptFailure(type=MODEL_ERROR, message=str(failed)), "reward": None}
                outcome = move_attempt(rollout.record, before, status if failed is None else "failed", now)
                if before.status not in LIVE_ATTEMPT and before.error is not None:
                    wanted.pop("error", None)
            if any(getattr(outcome.attempt, name) != value for name, value in wanted.items()):
                outcome = Outcome(outcome.rollout, outcome.attempt.model_copy(update=wanted))
            change = Change(outcome.attempt)
            if outcome.attempt is not before:
                change.move(rollout, row, outcome, now)
                worker_id = outcome.attempt.worker_id
                if worker_id not in (None, before.worker_id) and outcome.attempt.status in LIVE_ATTEMPT:
                    change.writes.append(Put(assign_work(await self._database.worker(worker_id), now)))
            return change

        ends = status is not UNSET and status not in LIVE_ATTEMPT
        return await self._database.change_attempt(rollout_id, attempt_id, plan, is_heartbeat=ends)

    async def release(self, rollout_id: str, attempt_id: str) -> AttemptedRollout:
        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[AttemptedRollout]:
            now = self._database.now()
            outcome = release(rollout.record, row.record, now)
            change = Change(join(*outcome))
            if outcome.attempt is not row.record:
                change.move(rollout, row, outcome, now)
            return change

        return await self._database.change_attempt(rollout_id, attempt_id, plan)

    async def add_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Stores spans; the first span of an attempt sets the attempt running.

        Raises:
            QuotaError: an attempt or a run would exceed its limit; no span is stored.
        """
        spans = [span.sealed() for span in spans]
        for span in spans:
            check_span(span)
        attempts = {(span.rollout_id, span.attempt_id) for span in spans}
        new = [attempt for attempt in attempts if not self._database.is_running(attempt)]
        backend = self._database.backend
        unknown = [each for each in attempts if not self._database.is_cached(each) and not self._quota.knows(each)]
        runs = {attempt: await self._database.run_of(attempt) for attempt in attempts}
        for attempt in unknown:
            where = Condition("rollout_id", "eq", attempt[0]), Condition("attempt_id", "eq", attempt[1])
            stored_before = (await backend.select(Query(Span, where, limit=0, count=True))).total or 0
            self._quota.recall(attempt, stored_before)
        sized = list(zip(spans, self._quota.reserve(spans, runs), strict=True))
        unstored = sized
        try:
            append = backend.append_spans(spans, self._database.now())
            if backend.durable and len(attempts) == len(new) == 1:  # concurrently, so that they can share a transaction
                stored, _ = await asyncio.gather(append, self._begin(*new[0]))
            else:
                stored = await append
                await asyncio.gather(*[self._begin(*attempt) for attempt in new])
            unstored = [each for each, result in zip(sized, stored, strict=True) if result is None]
        finally:
            self._quota.give_back(unstored, runs)
        return [span for span in stored if span is not None]

    async def take_sequence_ids(self, pairs: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Reserves a span number for each pair of rollout and attempt; the attempt may be "latest"."""
        latest = {rollout: attempt for rollout, attempt in pairs if attempt == "latest"}
        for rollout_id in latest:
            latest[rollout_id] = (await self._database.attempt(rollout_id, "latest"))[1].record.attempt_id
        resolved = [(rollout, latest[rollout] if attempt == "latest" else attempt) for rollout, attempt in pairs]
        return await self._database.backend.next_sequence_ids(resolved)

    async def _begin(self, rollout_id: str, attempt_id: str) -> None:
        """Moves an attempt that has a span from preparing to running."""

        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[None]:
            change = Change(None)
            if row.record.status == "preparing":
                now = self._database.now()
                change.move(rollout, row, move_attempt(rollout.record, row.record, "running", now), now)
            else:
                self._database.cache(rollout, row)
            return change

        await self._database.change_attempt(rollout_id, attempt_id, plan, is_heartbeat=True)

    async def lose(self, attempt: Attempt) -> bool:
        """Ends an attempt of a dead worker; returns False if it has already ended or has another worker by now."""
        reason = f"worker {attempt.worker_id!r} was reported dead"

        async def plan(rollout: Row[Rollout], row: Row[Attempt]) -> Change[bool]:
            if row.record.status not in LIVE_ATTEMPT or row.record.worker_id != attempt.worker_id:
                return Change(False)
            now = self._database.now()
            change = Change(True)
            n_lost = await self._database.count_lost_claims(row.record)
            change.revoke(rollout, row, lose_claim(rollout.record, row.record, now, reason, n_lost=n_lost), now)
            return change

        try:
            return await self._database.change_attempt(attempt.rollout_id, attempt.attempt_id, plan)
        except NotFoundError:  # it was deleted
            return False
