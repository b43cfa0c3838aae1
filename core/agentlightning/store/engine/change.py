"""The writes, guards and events of one change of rollouts and attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agentlightning.event import (
    AttemptFinished,
    AttemptRevoked,
    Event,
    RolloutEnqueued,
    RolloutFinished,
    RolloutStarted,
)
from agentlightning.records import ENDED_ROLLOUT, LIVE_ATTEMPT, Attempt, Record, Rollout
from agentlightning.store.backend import Delete, Guard, Put, Row, Write, key_of
from agentlightning.store.lifecycle import Outcome

E = TypeVar("E", RolloutEnqueued, RolloutStarted, RolloutFinished, AttemptFinished, AttemptRevoked)
R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass(slots=True)
class Change(Generic[T]):
    """One commit, and the result that the caller returns after the commit."""

    result: T
    writes: list[Write] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def insert(self, record: Record) -> None:
        """Writes a record, provided that no record has its key."""
        self.writes.append(Put(record))
        self.guards.append(Guard(type(record), key_of(record), 0))

    def replace(self, row: Row[R], record: R) -> None:
        """Writes a new version of a record, provided that it was not written since ``row`` was read."""
        self.writes.append(Put(record))
        self.guards.append(Guard(type(record), key_of(record), row.revision))

    def remove(self, row: Row[R]) -> None:
        """Removes a record, provided that it was not written since ``row`` was read."""
        key = key_of(row.record)
        self.writes.append(Delete(type(row.record), key))
        self.guards.append(Guard(type(row.record), key, row.revision))

    def move(self, rollout: Row[Rollout], attempt: Row[Attempt], after: Outcome, now: float) -> None:
        """Writes a transition of an attempt, and of its rollout, with the events.

        The rollout is guarded even if it does not change: a later attempt may have begun since the read.
        """
        self.guards.append(Guard(Rollout, key_of(rollout.record), rollout.revision))
        if after.rollout is not rollout.record:
            self.writes.append(Put(after.rollout))
        if after.attempt is not attempt.record:
            self.replace(attempt, after.attempt)
        if attempt.record.status in LIVE_ATTEMPT and after.attempt.status not in LIVE_ATTEMPT:
            failure = after.attempt.error
            ended = {field: getattr(after.attempt, field) for field in ("attempt_id", "status", "reward")}
            error = None if failure is None else f"{failure.type}: {failure.message}"
            self.events.append(make_event(AttemptFinished, rollout.record, now, **ended, error=error))
        self.events += rollout_events(rollout.record, after.rollout, now)

    def revoke(self, rollout: Row[Rollout], attempt: Row[Attempt], after: Outcome, now: float) -> None:
        """Like ``move``, for an end that the worker did not report, with the event that makes the worker stop."""
        self.move(rollout, attempt, after, now)
        ended = after.attempt
        reason = ended.status if ended.status in ("timeout", "unresponsive") else "cancelled"
        self.events.append(make_event(AttemptRevoked, after.rollout, now, attempt_id=ended.attempt_id, reason=reason))


def make_event(kind: type[E], rollout: Rollout, now: float, **fields: Any) -> E:
    return kind(run_id=rollout.run_id, time=now, rollout_id=rollout.rollout_id, **fields)


def rollout_started(after: Outcome, now: float) -> Event:
    rollout, attempt = after
    return make_event(RolloutStarted, rollout, now, attempt_id=attempt.attempt_id, worker_id=attempt.worker_id)


def rollout_events(before: Rollout, after: Rollout, now: float) -> Iterator[Event]:
    """Yields the event that a change of a rollout's status causes, if any."""
    if after.status == before.status:
        return
    if after.status in ENDED_ROLLOUT:
        yield make_event(RolloutFinished, after, now, status=after.status, mode=after.mode)
    elif after.status == "requeuing":
        yield make_event(RolloutEnqueued, after, now)
