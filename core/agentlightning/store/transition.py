"""What a step of the lifecycle writes: pure functions from records before and after to writes, guards and events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentlightning.errors import ConflictError
from agentlightning.event import (
    AttemptFinished,
    AttemptRevoked,
    Event,
    RolloutEnqueued,
    RolloutFinished,
    RolloutStarted,
)
from agentlightning.lifecycle import Outcome
from agentlightning.store.backend import Delete, Guard, Put, Row, Write, key_of
from agentlightning.types import ENDED_ROLLOUT, LIVE_ATTEMPT, Attempt, Record, Rollout, Worker

R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass(slots=True)
class Change(Generic[T]):
    """One commit in the making, and what its caller returns once it is done."""

    result: T
    writes: list[Write] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def replace(self, row: Row[R], record: R) -> None:
        """Writes a new form of a record, provided that nobody else has written it since ``row`` was read."""
        self.writes.append(Put(record))
        self.guards.append(Guard(type(record), key_of(record), row.revision))

    def insert(self, record: Record) -> None:
        """Writes a record, provided that there is none with its key."""
        self.writes.append(Put(record))
        self.guards.append(Guard(type(record), key_of(record), 0))

    def remove(self, row: Row[R]) -> None:
        """Removes a record, provided that nobody else has written it since ``row`` was read."""
        key = key_of(row.record)
        self.writes.append(Delete(type(row.record), key))
        self.guards.append(Guard(type(row.record), key, row.revision))

    def step(self, rollout: Row[Rollout], attempt: Row[Attempt] | None, after: Outcome, now: float) -> None:
        """Writes a step of the lifecycle with its events.

        The rollout is guarded even where it does not change: an attempt begun meanwhile would change it, and with it
        which attempt is the latest.
        """
        self.guards.append(Guard(Rollout, key_of(rollout.record), rollout.revision))
        if after.rollout is not rollout.record:
            self.writes.append(Put(after.rollout))
        if attempt is None:
            self.writes.append(Put(after.attempt))
        elif after.attempt is not attempt.record:
            self.replace(attempt, after.attempt)
        self.events += events_between(rollout.record, attempt.record if attempt else None, after, now)


def events_between(rollout: Rollout, attempt: Attempt | None, after: Outcome, now: float) -> Iterable[Event]:
    """The events that a step of a rollout and one of its attempts (None: it begins) means."""
    run_id, rollout_id = rollout.run_id, rollout.rollout_id
    if attempt is None:
        yield started(after, now)
    elif attempt.status in LIVE_ATTEMPT and after.attempt.status not in LIVE_ATTEMPT:
        error = after.attempt.error
        yield AttemptFinished(
            run_id=run_id,
            time=now,
            rollout_id=rollout_id,
            attempt_id=attempt.attempt_id,
            status=after.attempt.status,
            error=f"{error.type}: {error.message}" if error is not None else None,
        )
    yield from rollout_events(rollout, after.rollout, now)


def revoked(rollout: Rollout, attempt: Attempt, now: float) -> Event:
    """The event of an attempt that the store ended, so that whoever runs it stops."""
    reason = attempt.status if attempt.status in ("timeout", "unresponsive") else "cancelled"
    return AttemptRevoked(
        run_id=rollout.run_id, time=now, rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id, reason=reason
    )


def rollout_events(before: Rollout, after: Rollout, now: float) -> Iterable[Event]:
    """The events that a change of a rollout's status means."""
    if after.status == before.status:
        return
    if after.status in ENDED_ROLLOUT:
        yield RolloutFinished(
            run_id=after.run_id, time=now, rollout_id=after.rollout_id, status=after.status, mode=after.mode
        )
    elif after.status == "requeuing":
        yield RolloutEnqueued(run_id=after.run_id, time=now, rollout_id=after.rollout_id)


def started(outcome: Outcome, now: float) -> Event:
    """The event of an attempt that begins."""
    return RolloutStarted(
        run_id=outcome.rollout.run_id,
        time=now,
        rollout_id=outcome.rollout.rollout_id,
        attempt_id=outcome.attempt.attempt_id,
        worker_id=outcome.attempt.worker_id,
    )


def check_employed(worker: Worker) -> None:
    """Keeps work from a worker that was said to be dead: nobody would look after it.

    Raises:
        ConflictError: it was.
    """
    if worker.ended_at is not None:
        raise ConflictError(
            f"worker {worker.worker_id!r} was reported dead by end_worker and gets no more work; "
            "if it is alive, start it again with another worker_id"
        )


def take_work(worker: Worker, attempt: Attempt, now: float) -> Worker:
    """A worker that has just been given an attempt. Asking for work is a sign of life.

    Raises:
        ConflictError: it was said to be dead.
    """
    check_employed(worker)
    return worker.model_copy(
        update={
            "status": "busy",
            "last_heartbeat_time": now,
            "last_dequeue_time": now,
            "last_busy_time": now,
            "current_rollout_id": attempt.rollout_id,
            "current_attempt_id": attempt.attempt_id,
        }
    )


def describe_work(worker: Worker, live: Sequence[Attempt], now: float) -> Worker:
    """A worker's status as its live attempts say: busy with the newest of them, or idle; unknown if it is dead."""
    current = max(live, key=lambda attempt: attempt.start_time, default=None)
    status = "busy" if current is not None else "idle" if worker.ended_at is None else "unknown"
    changes: dict[str, str | float | None] = {
        "status": status,
        "current_rollout_id": None if current is None else current.rollout_id,
        "current_attempt_id": None if current is None else current.attempt_id,
    }
    if status not in (worker.status, "unknown"):
        changes[f"last_{status}_time"] = now
    return worker.model_copy(update=changes)
