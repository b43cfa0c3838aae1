"""Every cell of the lifecycle table, for the pure functions and for a store."""

from __future__ import annotations

import math
from itertools import product
from typing import get_args

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store.lifecycle import (
    MAX_LOST_CLAIMS,
    begin_attempt,
    counts_as_lost,
    end_overdue,
    last_heartbeat,
    lose_claim,
    move_attempt,
    move_rollout,
    release,
    retry,
)
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
)
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore

ROLLOUT_STATUSES: tuple[RolloutStatus, ...] = get_args(RolloutStatus)
ATTEMPT_STATUSES: tuple[AttemptStatus, ...] = get_args(AttemptStatus)

# The transitions of the contract, repeated on purpose: reading the table of lifecycle.py would copy its mistakes.
ROLLOUT_MOVES: set[tuple[RolloutStatus, RolloutStatus]] = {
    ("queuing", "preparing"),
    ("queuing", "cancelled"),
    ("requeuing", "preparing"),
    ("requeuing", "cancelled"),
    ("preparing", "running"),
    ("preparing", "succeeded"),
    ("preparing", "failed"),
    ("preparing", "requeuing"),
    ("preparing", "cancelled"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "requeuing"),
    ("running", "cancelled"),
}
ATTEMPT_ENDS: tuple[AttemptStatus, ...] = ("succeeded", "failed", "timeout", "unresponsive")
ATTEMPT_MOVES: set[tuple[AttemptStatus, AttemptStatus]] = {
    ("preparing", "running"),
    *(("preparing", end) for end in ATTEMPT_ENDS),
    *(("running", end) for end in ATTEMPT_ENDS),
}


def make_rollout(status: RolloutStatus, config: RolloutConfig | None = None) -> Rollout:
    return Rollout(rollout_id="ro-1", input="a", start_time=1.0, status=status, config=config or RolloutConfig())


def make_attempt(status: AttemptStatus, sequence_id: int = 1) -> Attempt:
    return Attempt(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=sequence_id,
        start_time=1.0,
        status=status,
        end_time=2.0 if status in ATTEMPT_ENDS else None,
        worker_id="worker-1",
        last_heartbeat_time=1.0,
    )


async def rollout_in(store: InMemoryLightningStore, status: RolloutStatus) -> Rollout:
    """Brings a stored rollout to a status."""
    config = RolloutConfig(max_attempts=2, retry_condition=["timeout"])
    queued = await store.enqueue_rollout("a", config=config)
    if status == "cancelled":
        await store.cancel_rollout(queued.rollout_id)
    elif status != "queuing":
        await store.dequeue_rollout()
        if status == "requeuing":
            await store.update_attempt(queued.rollout_id, "latest", status="timeout")
        elif status != "preparing":
            await store.update_attempt(queued.rollout_id, "latest", status=status)
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert rollout is not None
    assert rollout.status == status
    return rollout


@pytest.mark.parametrize(("status", "target"), [*product(ROLLOUT_STATUSES, ROLLOUT_STATUSES)])
def test_a_rollout_changes_its_status_only_as_the_table_allows(status: RolloutStatus, target: RolloutStatus) -> None:
    rollout = make_rollout(status)
    if status == target:
        assert move_rollout(rollout, target, 5.0) is rollout
    elif (status, target) in ROLLOUT_MOVES:
        moved = move_rollout(rollout, target, 5.0)
        ended = target in ("succeeded", "failed", "cancelled")
        assert moved.model_dump() == {**rollout.model_dump(), "status": target, "end_time": 5.0 if ended else None}
    else:
        with pytest.raises(ConflictError, match=rf"{status} and cannot become {target}"):
            move_rollout(rollout, target, 5.0)
    assert rollout == make_rollout(status)


@pytest.mark.parametrize(("status", "target"), [*product(ROLLOUT_STATUSES, ROLLOUT_STATUSES)])
async def test_a_stored_rollout_changes_its_status_only_as_the_table_allows(
    status: RolloutStatus, target: RolloutStatus
) -> None:
    store = InMemoryLightningStore()
    before = await rollout_in(store, status)
    if (status, target) in ROLLOUT_MOVES:
        assert (await store.update_rollout(before.rollout_id, status=target)).status == target
    elif status == target:
        assert await store.update_rollout(before.rollout_id, status=target) == before
    else:
        with pytest.raises(ConflictError):
            await store.update_rollout(before.rollout_id, status=target, metadata={"changed": True})
        assert await store.get_rollout_by_id(before.rollout_id) == before
    claimable = await store.dequeue_rollout()
    after = target if (status, target) in ROLLOUT_MOVES else status
    assert (claimable is not None) == (after in ("queuing", "requeuing"))
    await store.close()


@pytest.mark.parametrize(("status", "target"), [*product(ATTEMPT_STATUSES, ATTEMPT_STATUSES)])
def test_an_attempt_changes_its_status_only_as_the_table_allows(status: AttemptStatus, target: AttemptStatus) -> None:
    attempt = make_attempt(status)
    rollout = make_rollout("running" if status == "running" else "preparing")
    if status == target:
        assert move_attempt(rollout, attempt, target, 5.0) == (rollout, attempt)
    elif status in ATTEMPT_ENDS and target in ATTEMPT_ENDS:
        outcome = move_attempt(rollout, attempt, target, 5.0)
        assert outcome.rollout is rollout
        assert outcome.attempt.model_dump() == {**attempt.model_dump(), "late_status": target}
    elif (status, target) in ATTEMPT_MOVES:
        outcome = move_attempt(rollout, attempt, target, 5.0)
        assert outcome.attempt.status == target
        assert outcome.attempt.end_time == (5.0 if target in ATTEMPT_ENDS else None)
        assert outcome.rollout.status == (target if target in ("running", "succeeded") else "failed")
    else:
        with pytest.raises(ConflictError, match=rf"{status} and cannot become {target}"):
            move_attempt(rollout, attempt, target, 5.0)


@pytest.mark.parametrize(("status", "target"), [*product(ATTEMPT_STATUSES, ATTEMPT_STATUSES)])
async def test_a_stored_attempt_changes_its_status_only_as_the_table_allows(
    status: AttemptStatus, target: AttemptStatus
) -> None:
    store = InMemoryLightningStore()
    claimed = await store.start_rollout("a")
    if status != "preparing":
        await store.update_attempt(claimed.rollout_id, "latest", status=status)
    before = await store.get_rollout_by_id(claimed.rollout_id)
    assert isinstance(before, AttemptedRollout)
    if status == target:
        assert await store.update_attempt(claimed.rollout_id, "latest", status=target) == before.attempt
    elif (status, target) in ATTEMPT_MOVES:
        assert (await store.update_attempt(claimed.rollout_id, "latest", status=target)).status == target
    elif target in ATTEMPT_ENDS:
        late = await store.update_attempt(claimed.rollout_id, "latest", status=target)
        assert late.model_dump() == {**before.attempt.model_dump(), "late_status": target}
        after = await store.get_rollout_by_id(claimed.rollout_id)
        assert after is not None
        assert after.status == before.status
    else:
        with pytest.raises(ConflictError):
            await store.update_attempt(claimed.rollout_id, "latest", status=target, metadata={"changed": True})
        assert await store.get_rollout_by_id(claimed.rollout_id) == before
    await store.close()


@pytest.mark.parametrize("status", ROLLOUT_STATUSES)
def test_a_new_attempt_begins_only_while_no_other_attempt_is_live(status: RolloutStatus) -> None:
    if status in ("queuing", "requeuing", "failed", "cancelled"):
        rollout, attempt = begin_attempt(make_rollout(status), "at-2", 2, 5.0, "worker-1")
        assert (rollout.status, rollout.end_time) == ("preparing", None)
        assert (attempt.status, attempt.sequence_id, attempt.start_time) == ("preparing", 2, 5.0)
    else:
        with pytest.raises(ConflictError, match=status):
            begin_attempt(make_rollout(status), "at-2", 2, 5.0)


@pytest.mark.parametrize("status", ROLLOUT_STATUSES)
def test_only_failed_and_cancelled_rollouts_can_be_retried(status: RolloutStatus) -> None:
    if status in ("failed", "cancelled"):
        assert retry(make_rollout(status)).status == "requeuing"
    else:
        with pytest.raises(ConflictError, match=status):
            retry(make_rollout(status))


@pytest.mark.parametrize(("end", "sequence_id"), [*product(("failed", "timeout", "unresponsive"), (1, 2, 3))])
def test_a_failed_attempt_is_retried_as_the_config_says_while_attempts_are_left(
    end: AttemptStatus, sequence_id: int
) -> None:
    config = RolloutConfig(max_attempts=3, retry_condition=["failed", "unresponsive"])
    rollout, _ = move_attempt(make_rollout("running", config), make_attempt("running", sequence_id), end, 5.0)
    assert rollout.status == ("requeuing" if end != "timeout" and sequence_id < 3 else "failed")


@pytest.mark.parametrize("status", ["queuing", "requeuing", "failed", "cancelled", "succeeded"])
def test_the_end_of_an_attempt_does_not_change_a_rollout_that_is_not_running(status: RolloutStatus) -> None:
    rollout = make_rollout(status)
    error = AttemptFailure(type="ValueError", message="no")
    outcome = move_attempt(rollout, make_attempt("running"), "failed", 5.0, error=error)
    assert outcome.rollout is rollout
    assert (outcome.attempt.status, outcome.attempt.error) == ("failed", error)


def test_a_rollout_whose_claim_is_lost_before_it_runs_is_queued_again_with_any_config() -> None:
    rollout, attempt = lose_claim(make_rollout("preparing"), make_attempt("preparing"), 5.0, "it died")
    assert (rollout.status, attempt.status, attempt.end_time) == ("requeuing", "unresponsive", 5.0)
    rollout, attempt = lose_claim(make_rollout("running"), make_attempt("running"), 5.0, "it died")
    assert (rollout.status, attempt.status) == ("failed", "unresponsive")


def test_a_rollout_whose_claim_is_lost_five_times_fails_and_its_error_shows_the_task() -> None:
    for n_lost in range(MAX_LOST_CLAIMS):
        outcome = lose_claim(make_rollout("preparing"), make_attempt("preparing"), 5.0, "it died", n_lost=n_lost)
        assert counts_as_lost(outcome.attempt)
        assert outcome.rollout.status == ("requeuing" if n_lost < MAX_LOST_CLAIMS - 1 else "failed")
    assert outcome.attempt.error is not None
    assert outcome.attempt.error.message.startswith("it died; 5 workers died before the first span of rollout")
    assert repr(make_rollout("preparing").input) in outcome.attempt.error.message


def test_a_claim_counts_as_lost_only_if_its_worker_died() -> None:
    rollout, attempt = make_rollout("preparing"), make_attempt("preparing")
    assert not counts_as_lost(release(rollout, attempt, 5.0).attempt)
    for is_worker_alive in (True, False):
        ended = end_overdue(
            rollout, attempt, 99.0, worker_seen=None, lease_s=60, is_worker_alive=is_worker_alive, n_lost=4
        )
        assert ended is not None
        assert counts_as_lost(ended.attempt) is not is_worker_alive
        assert ended.rollout.status == ("requeuing" if is_worker_alive else "failed")


def end_status(
    rollout: Rollout, attempt: Attempt, now: float, worker_seen: float | None, lease_s: float
) -> AttemptStatus | None:
    outcome = end_overdue(rollout, attempt, now, worker_seen=worker_seen, lease_s=lease_s)
    return None if outcome is None else outcome.attempt.status


@pytest.mark.parametrize(
    ("now", "worker_seen", "expected"),
    [
        (10.9, None, None),
        (11.1, None, "timeout"),  # started at 1, timeout 10
        (6.1, None, "unresponsive"),  # last seen at 1, unresponsive after 5
        (6.1, 6.0, "unresponsive"),  # the worker lives, but the attempt is silent
        (5.9, None, None),
    ],
)
def test_attempts_end_at_the_deadlines_of_the_config(
    now: float, worker_seen: float | None, expected: str | None
) -> None:
    config = RolloutConfig(timeout_seconds=10, unresponsive_seconds=5 if now < 10 else None)
    rollout = make_rollout("running", config)
    assert end_status(rollout, make_attempt("running"), now, worker_seen, lease_s=math.inf) == expected


def test_a_lease_is_renewed_by_spans_and_by_the_worker() -> None:
    rollout, attempt = make_rollout("running"), make_attempt("running")
    assert end_status(rollout, attempt, 61.5, None, lease_s=60) == "unresponsive"
    assert end_status(rollout, attempt, 61.5, 30.0, lease_s=60) is None
    beating = attempt.model_copy(update={"last_heartbeat_time": 30.0})
    assert end_status(rollout, beating, 61.5, None, lease_s=60) is None
    unowned = attempt.model_copy(update={"worker_id": None})
    assert end_status(rollout, unowned, 61.5, None, lease_s=60) == "unresponsive"
    assert end_status(rollout, unowned, 60.5, None, lease_s=60) is None


def test_a_heartbeat_renews_the_leases_of_the_attempts_that_the_worker_names() -> None:
    attempt = make_attempt("preparing")
    worker = Worker(worker_id="worker-1", last_heartbeat_time=30.0)
    assert last_heartbeat(None, attempt) is None
    assert last_heartbeat(worker, attempt) == 30.0
    assert last_heartbeat(worker.model_copy(update={"attempt_ids": ["at-1"]}), attempt) == 30.0
    assert last_heartbeat(worker.model_copy(update={"attempt_ids": []}), attempt) is None


@pytest.mark.parametrize("status", ATTEMPT_STATUSES)
def test_only_a_claim_that_has_not_begun_can_be_released(status: AttemptStatus) -> None:
    rollout, attempt = make_rollout("running" if status == "running" else "preparing"), make_attempt(status)
    if status == "running":
        with pytest.raises(ConflictError, match="running"):
            release(rollout, attempt, 5.0)
    elif status == "preparing":
        outcome = release(rollout, attempt, 5.0)
        assert (outcome.rollout.status, outcome.attempt.status, outcome.attempt.end_time) == (
            "requeuing",
            "unresponsive",
            5.0,
        )
        assert outcome.attempt.last_heartbeat_time == 1.0
    else:
        assert release(rollout, attempt, 5.0) == (rollout, attempt)
