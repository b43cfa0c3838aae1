"""The lifecycle of rollouts and attempts, once, as a table and pure functions.

    rollout  queuing -> preparing | cancelled            requeuing -> preparing | cancelled
             preparing -> running | succeeded | failed | requeuing | cancelled
             running -> succeeded | failed | requeuing | cancelled
             failed | cancelled -> preparing by a new attempt; -> requeuing by an explicit retry
             succeeded: final
    attempt  preparing -> running | succeeded | failed | timeout | unresponsive ;  running -> the same ends

No I/O and no clock: ``now`` is an argument. Every function returns new records and changes none; whatever the table
does not list raises ConflictError.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.errors import ConflictError
from agentlightning.types import (
    ENDED_ROLLOUT,
    LIVE_ATTEMPT,
    Attempt,
    AttemptFailure,
    AttemptStatus,
    Rollout,
    RolloutStatus,
    Worker,
)

R = TypeVar("R", Rollout, Attempt)

ROLLOUT_TRANSITIONS: Final[Mapping[RolloutStatus, frozenset[RolloutStatus]]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "requeuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"running", "succeeded", "failed", "requeuing", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "requeuing", "cancelled"}),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "succeeded": frozenset(),
}
_ATTEMPT_ENDS: Final[frozenset[AttemptStatus]] = frozenset({"succeeded", "failed", "timeout", "unresponsive"})
ATTEMPT_TRANSITIONS: Final[Mapping[AttemptStatus, frozenset[AttemptStatus]]] = {
    "preparing": _ATTEMPT_ENDS | {"running"},
    "running": _ATTEMPT_ENDS,
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
    "unresponsive": frozenset(),
}


class Outcome(NamedTuple):
    """A rollout and its attempt after a transition; either may be unchanged."""

    rollout: Rollout
    attempt: Attempt


def _say(allowed: Collection[str]) -> str:
    return f"it can become: {', '.join(sorted(allowed))}" if allowed else "its end is final"


def move_rollout(rollout: Rollout, status: RolloutStatus, now: float) -> Rollout:
    """Moves a rollout along the table; the same status again changes nothing."""
    if status == rollout.status:
        return rollout
    allowed = ROLLOUT_TRANSITIONS[rollout.status]
    if status not in allowed:
        raise ConflictError(
            f"rollout {rollout.rollout_id} is {rollout.status} and cannot become {status}; {_say(allowed)}"
        )
    return _with(rollout, status=status, end_time=now if status in ENDED_ROLLOUT else None)


def begin_attempt(
    rollout: Rollout, attempt_id: str, sequence_id: int, now: float, worker_id: str | None = None
) -> Outcome:
    """Gives a rollout its next attempt: from the queue, at its start, or by hand after it failed or was cancelled."""
    if rollout.status not in ("queuing", "requeuing", "failed", "cancelled"):
        raise ConflictError(
            f"rollout {rollout.rollout_id} is {rollout.status}; a new attempt can begin while it is "
            "queuing, requeuing, failed or cancelled"
        )
    attempt = Attempt(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=now,
        worker_id=worker_id,
        last_heartbeat_time=now,
    )
    return Outcome(_with(rollout, status="preparing", end_time=None), attempt)


def move_attempt(
    rollout: Rollout,
    attempt: Attempt,
    status: AttemptStatus,
    now: float,
    *,
    error: AttemptFailure | None = None,
    heard: bool = True,
) -> Outcome:
    """Moves an attempt, and with it the rollout: a live attempt is always the latest one.

    ``heard`` says that its worker said so, which is a sign of life; the store's own verdict is none.

    A result for an attempt that has ended is kept as ``late_status`` and touches nothing else. Failed, timed-out and
    unresponsive attempts send the rollout back to the queue where its config says so, else they fail it.
    """
    if attempt.status not in LIVE_ATTEMPT:
        if status == attempt.status:
            return Outcome(rollout, attempt)
        if status in _ATTEMPT_ENDS:
            return Outcome(rollout, _with(attempt, late_status=status))
    elif status == attempt.status:
        return Outcome(rollout, attempt)
    if status not in ATTEMPT_TRANSITIONS[attempt.status]:
        allowed = _say(ATTEMPT_TRANSITIONS[attempt.status])
        raise ConflictError(f"attempt {attempt.attempt_id} is {attempt.status} and cannot become {status}; {allowed}")
    ended = status in _ATTEMPT_ENDS
    attempt = _with(
        attempt,
        status=status,
        end_time=now if ended else None,
        last_heartbeat_time=now if heard else attempt.last_heartbeat_time,
        error=error or attempt.error,
    )
    if rollout.status not in ("preparing", "running"):
        return Outcome(rollout, attempt)
    return Outcome(move_rollout(rollout, _rollout_status_after(rollout, attempt), now), attempt)


def lose_claim(rollout: Rollout, attempt: Attempt, now: float, error: AttemptFailure | None = None) -> Outcome:
    """Ends the live attempt of a worker that is gone.

    An attempt that never began running did nothing, so its rollout is queued again whatever its config says; one that
    had begun is unresponsive, and the config decides.
    """
    if attempt.status == "preparing" and rollout.status == "preparing":
        ended = _with(attempt, status="unresponsive", end_time=now, error=error or attempt.error)
        return Outcome(move_rollout(rollout, "requeuing", now), ended)
    return move_attempt(rollout, attempt, "unresponsive", now, error=error, heard=False)


def release(rollout: Rollout, attempt: Attempt, now: float) -> Outcome:
    """Takes back a claim whose worker has not begun; of one that has ended there is nothing to take back."""
    if attempt.status not in LIVE_ATTEMPT:
        return Outcome(rollout, attempt)
    if attempt.status != "preparing":
        raise ConflictError(
            f"attempt {attempt.attempt_id} is {attempt.status} and cannot be handed back; only one that is preparing "
            "can. Report how it ended instead"
        )
    error = AttemptFailure(type="Released", message="its worker handed it back before it began")
    return lose_claim(rollout, attempt, now, error)


def retry(rollout: Rollout) -> Rollout:
    """Queues a failed or cancelled rollout again because somebody asked for it."""
    if rollout.status not in ("failed", "cancelled"):
        raise ConflictError(
            f"rollout {rollout.rollout_id} is {rollout.status}; only failed and cancelled ones can be retried"
        )
    return _with(rollout, status="requeuing", end_time=None)


def due_status(
    rollout: Rollout, attempt: Attempt, now: float, *, worker_seen: float | None, lease_s: float | None
) -> AttemptStatus | None:
    """Says what a live attempt has become by the passing of time: timeout, unresponsive or (None) nothing.

    The lease is renewed by spans, by heartbeats of the attempt and by those of its worker (``worker_seen``).
    """
    seen = attempt.last_heartbeat_time or attempt.start_time
    config = rollout.config
    if config.timeout_seconds is not None and now - attempt.start_time > config.timeout_seconds:
        return "timeout"
    if config.unresponsive_seconds is not None and now - seen > config.unresponsive_seconds:
        return "unresponsive"
    if lease_s is not None and now - max(seen, worker_seen or 0.0) > lease_s:
        return "unresponsive"
    return None


def heard_of(worker: Worker | None, attempt: Attempt) -> float | None:
    """When the worker of an attempt last gave a sign of life that counts for this attempt.

    A worker that says which attempts it runs speaks for these only: a claim whose answer never reached it must not be
    kept alive by it.
    """
    if worker is None or (worker.attempt_ids is not None and attempt.attempt_id not in worker.attempt_ids):
        return None
    return worker.last_heartbeat_time


def _rollout_status_after(rollout: Rollout, attempt: Attempt) -> RolloutStatus:
    if attempt.status == "running" or attempt.status == "preparing":
        return attempt.status
    if attempt.status == "succeeded":
        return "succeeded"
    config = rollout.config
    if attempt.status in config.retry_condition and attempt.sequence_id < config.max_attempts:
        return "requeuing"
    return "failed"


def _with(record: R, **changes: Any) -> R:
    return record.model_copy(update=changes)
