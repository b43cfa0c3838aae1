"""The lifecycle of rollouts and attempts, as tables and pure functions.

The functions do no I/O, take the time as ``now`` and return new records. A transition that is not in the table raises
ConflictError.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from agentlightning.errors import ConflictError
from agentlightning.frozen import thaw
from agentlightning.records import (
    ENDED_ROLLOUT,
    LIVE_ATTEMPT,
    Attempt,
    AttemptFailure,
    AttemptStatus,
    Rollout,
    RolloutStatus,
    Worker,
)

ROLLOUT_TRANSITIONS: Final[Mapping[RolloutStatus, frozenset[RolloutStatus]]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "requeuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"running", "succeeded", "failed", "requeuing", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "requeuing", "cancelled"}),
    "failed": frozenset(),  # only ``begin_attempt`` and ``retry`` leave failed and cancelled
    "cancelled": frozenset(),
    "succeeded": frozenset(),
}
_ATTEMPT_ENDS: Final[frozenset[AttemptStatus]] = frozenset({"succeeded", "failed", "timeout", "unresponsive"})
_ATTEMPT_TRANSITIONS: Final[Mapping[AttemptStatus, frozenset[AttemptStatus]]] = {
    "preparing": _ATTEMPT_ENDS | {"running"},
    "running": _ATTEMPT_ENDS,
}

MODEL_ERROR: Final = "model_error"
"""Error type of an attempt whose last model call failed; the gateway writes it to the metadata by this key."""
LOST_CLAIM: Final = "LostClaim"  # the error type of an attempt whose worker died before its first span
MAX_LOST_CLAIMS: Final = 5
"""A rollout fails when this many workers have died before its first span: its task probably kills their processes."""


class Outcome(NamedTuple):
    """A rollout and its attempt after a transition; either may be unchanged."""

    rollout: Rollout
    attempt: Attempt


def _check(shown: str, status: str, target: str, allowed: Collection[str]) -> None:
    if target not in allowed:
        allows = f"it can become: {', '.join(sorted(allowed))}" if allowed else "this status is final"
        raise ConflictError(f"{shown} is {status} and cannot become {target}; {allows}")


def move_rollout(rollout: Rollout, status: RolloutStatus, now: float) -> Rollout:
    """Moves a rollout to a status that the table allows; its current status changes nothing."""
    if status == rollout.status:
        return rollout
    _check(f"rollout {rollout.rollout_id}", rollout.status, status, ROLLOUT_TRANSITIONS[rollout.status])
    return rollout.model_copy(update={"status": status, "end_time": now if status in ENDED_ROLLOUT else None})


def begin_attempt(
    rollout: Rollout, attempt_id: str, sequence_id: int, now: float, worker_id: str | None = None
) -> Outcome:
    """Begins the next attempt of a rollout that is queued, has failed or was cancelled."""
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
    return Outcome(rollout.model_copy(update={"status": "preparing", "end_time": None}), attempt)


def move_attempt(
    rollout: Rollout,
    attempt: Attempt,
    status: AttemptStatus,
    now: float,
    *,
    error: AttemptFailure | None = None,
    is_heartbeat: bool = True,
) -> Outcome:
    """Moves an attempt to a status, and its rollout with it: a live attempt is always the latest attempt.

    A result for an attempt that has ended is kept as ``late_status`` and changes nothing else. Failed, timed-out and
    unresponsive attempts return the rollout to the queue if its config allows a retry, and fail it otherwise.
    ``is_heartbeat``: whether the worker reported the status; a status that the store sets is not a sign of life.
    """
    if status == attempt.status:
        return Outcome(rollout, attempt)
    if attempt.status not in LIVE_ATTEMPT and status in _ATTEMPT_ENDS:
        return Outcome(rollout, attempt.model_copy(update={"late_status": status}))
    _check(f"attempt {attempt.attempt_id}", attempt.status, status, _ATTEMPT_TRANSITIONS.get(attempt.status, ()))
    attempt = attempt.model_copy(
        update={
            "status": status,
            "end_time": now if status in _ATTEMPT_ENDS else None,
            "last_heartbeat_time": now if is_heartbeat else attempt.last_heartbeat_time,
            "error": error or attempt.error,
        }
    )
    if rollout.status not in ("preparing", "running"):
        return Outcome(rollout, attempt)
    target: RolloutStatus = "failed"
    if status in ("preparing", "running", "succeeded"):
        target = status
    elif status in rollout.config.retry_condition and attempt.sequence_id < rollout.config.max_attempts:
        target = "requeuing"
    return Outcome(move_rollout(rollout, target, now), attempt)


def lose_claim(rollout: Rollout, attempt: Attempt, now: float, reason: str, *, n_lost: int = 0) -> Outcome:
    """Ends the live attempt of a worker that died.

    An attempt that had not started returns its rollout to the queue regardless of the config, or fails it if ``n_lost``
    earlier attempts ended like this and the limit is reached. Other attempts are unresponsive: the config decides.
    """
    if attempt.status != "preparing" or rollout.status != "preparing":
        error = AttemptFailure(type="Unresponsive", message=reason)
        return move_attempt(rollout, attempt, "unresponsive", now, error=error, is_heartbeat=False)
    if n_lost + 1 < MAX_LOST_CLAIMS:
        return _return_claim(rollout, attempt, now, AttemptFailure(type=LOST_CLAIM, message=reason))
    message = (
        f"{reason}; {n_lost + 1} workers died before the first span of rollout {rollout.rollout_id}, so it is not "
        "tried again: its task probably kills the agent's process, whose output may say why. Correct the agent or "
        f"the task, then: agl rollouts retry {rollout.rollout_id}. The task: {thaw(rollout.input)!r:.300}"
    )
    return _return_claim(rollout, attempt, now, AttemptFailure(type=LOST_CLAIM, message=message), "failed")


def _return_claim(
    rollout: Rollout, attempt: Attempt, now: float, error: AttemptFailure, target: RolloutStatus = "requeuing"
) -> Outcome:
    changes = {"status": "unresponsive", "end_time": now, "error": error}
    return Outcome(move_rollout(rollout, target, now), attempt.model_copy(update=changes))


def counts_as_lost(attempt: Attempt) -> bool:
    """Whether the attempt ended because its worker died before the first span."""
    return attempt.error is not None and attempt.error.type == LOST_CLAIM


def release(rollout: Rollout, attempt: Attempt, now: float) -> Outcome:
    """Revokes a claim that its worker has not started; leaves an attempt that has ended unchanged."""
    if attempt.status not in LIVE_ATTEMPT:
        return Outcome(rollout, attempt)
    if attempt.status != "preparing":
        raise ConflictError(
            f"attempt {attempt.attempt_id} is {attempt.status} and cannot be released; only an attempt that is "
            "preparing can. Report how it ended instead"
        )
    error = AttemptFailure(type="Released", message="the worker released the claim before it began")
    if rollout.status != "preparing":
        return move_attempt(rollout, attempt, "unresponsive", now, error=error, is_heartbeat=False)
    return _return_claim(rollout, attempt, now, error)


def retry(rollout: Rollout) -> Rollout:
    """Queues a failed or cancelled rollout again on request."""
    if rollout.status not in ("failed", "cancelled"):
        raise ConflictError(
            f"rollout {rollout.rollout_id} is {rollout.status}; only failed and cancelled rollouts can be retried"
        )
    return rollout.model_copy(update={"status": "requeuing", "end_time": None})


def end_overdue(
    rollout: Rollout,
    attempt: Attempt,
    now: float,
    *,
    worker_seen: float | None,
    lease_s: float,
    is_worker_alive: bool = False,
    n_lost: int = 0,
) -> Outcome | None:
    """Ends a live attempt that is past its timeout or was silent for too long; returns None if it may continue.

    Spans, heartbeats of the attempt and heartbeats of its worker (``worker_seen``) renew the lease. A worker that is
    alive but does not report the attempt has not received the claim. ``n_lost`` is passed to ``lose_claim``.
    """
    config = rollout.config
    seen = attempt.last_heartbeat_time or attempt.start_time
    if config.timeout_seconds is not None and now - attempt.start_time > config.timeout_seconds:
        error = AttemptFailure(type="Timeout", message=f"no result within timeout_seconds={config.timeout_seconds}")
        return move_attempt(rollout, attempt, "timeout", now, error=error, is_heartbeat=False)
    if config.unresponsive_seconds is not None and now - seen > config.unresponsive_seconds:
        message = f"no span or heartbeat for unresponsive_seconds={config.unresponsive_seconds}"
        error = AttemptFailure(type="Unresponsive", message=message)
        return move_attempt(rollout, attempt, "unresponsive", now, error=error, is_heartbeat=False)
    if now - max(seen, worker_seen or 0.0) > lease_s:
        worker = "" if attempt.worker_id is None else f" of worker {attempt.worker_id!r}"
        message = f"neither a span nor a heartbeat{worker} for the lease of {lease_s:g} s"
        if is_worker_alive and attempt.status == rollout.status == "preparing":
            return _return_claim(rollout, attempt, now, AttemptFailure(type="Unresponsive", message=message))
        return lose_claim(rollout, attempt, now, message, n_lost=n_lost)
    return None


def last_heartbeat(worker: Worker | None, attempt: Attempt) -> float | None:
    """Returns when the worker of an attempt last gave a sign of life that counts for this attempt.

    If a worker reports its attempts, its heartbeats count for these attempts only, so a claim whose response never
    reached the worker is lost after a lease.
    """
    if worker is None or (worker.attempt_ids is not None and attempt.attempt_id not in worker.attempt_ids):
        return None
    return worker.last_heartbeat_time


def assign_work(worker: Worker, now: float) -> Worker:
    """Marks a worker as busy with a new attempt, a sign of life; raises ConflictError if it was reported dead."""
    if worker.ended_at is not None:
        raise ConflictError(
            f"worker {worker.worker_id!r} was reported dead by end_worker and gets no more work; "
            "if it is alive, start it again with another worker_id"
        )
    times = dict.fromkeys(("last_heartbeat_time", "last_dequeue_time", "last_busy_time"), now)
    return worker.model_copy(update={"status": "busy", **times})
