"""The lifecycle: transitions, retries, deadlines, late results."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.records import AttemptedRollout, AttemptFailure, AttemptStatus, RolloutConfig
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import (
    claim,
    dequeue,
    finish,
    latest_attempt,
    make_span,
    read,
    read_attempted,
    soon,
)


class LifecycleTests:
    """Tests of the statuses of rollouts and attempts."""

    async def test_a_span_sets_an_attempt_and_its_rollout_running(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.add_span(make_span(claimed))
        now = await read_attempted(store, claimed.rollout_id)
        assert (now.status, now.attempt.status) == ("running", "running")

    async def test_a_worker_can_report_that_its_attempt_is_running(self, store: LightningStore) -> None:
        claimed = await claim(store)
        attempt = await store.update_attempt(claimed.rollout_id, "latest", status="running", worker_id="worker-1")
        assert (attempt.status, attempt.worker_id) == ("running", "worker-1")
        assert (await read(store, claimed.rollout_id)).status == "running"

    async def test_success_of_the_latest_attempt_ends_the_rollout(self, store: LightningStore) -> None:
        claimed = await claim(store)
        attempt = await finish(store, claimed)
        rollout = await read(store, claimed.rollout_id)
        assert (attempt.status, rollout.status) == ("succeeded", "succeeded")
        assert attempt.end_time is not None
        assert rollout.end_time is not None
        assert attempt.start_time <= attempt.end_time

    async def test_a_failed_attempt_without_retries_fails_the_rollout(self, store: LightningStore) -> None:
        claimed = await claim(store)
        error = AttemptFailure(type="ValueError", message="no answer", traceback="Traceback ...")
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed", error=error)
        rollout = await read_attempted(store, claimed.rollout_id)
        assert (rollout.status, rollout.attempt.error) == ("failed", error)
        assert rollout.end_time is not None
        assert await store.dequeue_rollout() is None

    async def test_a_failed_attempt_is_retried_as_the_config_says(self, store: LightningStore) -> None:
        claimed = await claim(store, config=RolloutConfig(max_attempts=3, retry_condition=["failed"]))
        for number in (2, 3):
            await store.update_attempt(claimed.rollout_id, "latest", status="failed")
            waiting = await read(store, claimed.rollout_id)
            assert (waiting.status, waiting.end_time) == ("requeuing", None)
            again = await dequeue(store)
            assert (again.rollout_id, again.attempt.sequence_id) == (claimed.rollout_id, number)
        await store.update_attempt(claimed.rollout_id, "latest", status="failed")
        assert (await read(store, claimed.rollout_id)).status == "failed"
        attempts = await store.query_attempts(claimed.rollout_id)
        assert [(attempt.sequence_id, attempt.status) for attempt in attempts] == [
            (1, "failed"),
            (2, "failed"),
            (3, "failed"),
        ]

    @pytest.mark.parametrize("status", ["timeout", "unresponsive"])
    async def test_only_statuses_in_the_retry_condition_are_retried(
        self, store: LightningStore, status: AttemptStatus
    ) -> None:
        claimed = await claim(store, config=RolloutConfig(max_attempts=3, retry_condition=["failed"]))
        await finish(store, claimed, status)
        assert (await read(store, claimed.rollout_id)).status == "failed"

    async def test_an_illegal_transition_is_refused_and_changes_nothing(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.update_attempt(claimed.rollout_id, "latest", status="running")
        before = await read(store, claimed.rollout_id)
        with pytest.raises(ConflictError):
            await store.update_attempt(claimed.rollout_id, "latest", status="preparing", metadata={"no": 1})
        with pytest.raises(ConflictError):
            await store.update_rollout(claimed.rollout_id, status="queuing", metadata={"no": 1})
        with pytest.raises(ConflictError):
            await store.start_attempt(claimed.rollout_id)
        with pytest.raises(ConflictError):
            await store.retry_rollout(claimed.rollout_id)
        assert await read(store, claimed.rollout_id) == before
        assert await store.dequeue_rollout() is None

    async def test_a_succeeded_rollout_is_final(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed)
        before = await read(store, claimed.rollout_id)
        for call in (store.cancel_rollout, store.retry_rollout, store.start_attempt):
            with pytest.raises(ConflictError):
                await call(claimed.rollout_id)
        for status in ("queuing", "preparing", "running", "failed", "cancelled", "requeuing"):
            with pytest.raises(ConflictError):
                await store.update_rollout(claimed.rollout_id, status=status)
        assert await read(store, claimed.rollout_id) == before

    async def test_concurrent_changes_are_all_kept(self, store: LightningStore) -> None:
        claimed = await claim(store)
        id_ = claimed.rollout_id
        changes: list[tuple[Coroutine[Any, Any, object], Coroutine[Any, Any, object]]] = [
            (store.update_rollout(id_, metadata={"note": 1}), store.update_rollout(id_, mode="test")),
            (store.update_attempt(id_, "latest", metadata={"seed": 1}), store.add_span(make_span(claimed))),
            (store.update_attempt(id_, "latest", spans_dropped=3), store.update_rollout(id_, input="changed")),
            (store.update_rollout(id_, metadata={"note": 2}), finish(store, claimed)),
        ]
        for pair in changes:
            await soon(asyncio.gather(*pair))
        now = await read_attempted(store, id_)
        assert (now.status, now.metadata, now.mode, now.input) == ("succeeded", {"note": 2}, "test", "changed")
        assert (now.attempt.status, now.attempt.metadata, now.attempt.spans_dropped) == ("succeeded", {"seed": 1}, 3)

    async def test_an_unknown_status_is_refused(self, store: LightningStore) -> None:
        claimed = await claim(store)
        with pytest.raises(ConfigError):
            await store.update_attempt(claimed.rollout_id, "latest", status="done")  # type: ignore[arg-type] # intended
        with pytest.raises(ConfigError):
            await store.update_rollout(claimed.rollout_id, status="done")  # type: ignore[arg-type] # intended
        assert await read(store, claimed.rollout_id) == claimed

    async def test_a_repeated_finish_changes_nothing(self, store: LightningStore) -> None:
        claimed = await claim(store)
        first = await finish(store, claimed)
        assert await finish(store, claimed) == first

    async def test_a_value_of_the_wrong_type_is_refused(self, store: LightningStore) -> None:
        claimed = await claim(store)
        wrong: dict[str, Any] = {
            "last_heartbeat_time": "x",
            "spans_dropped": 2**63,
            "reward": "high",
            "worker_id": 7,
            "metadata": "x",
            "error": "x",
        }
        for name, value in wrong.items():
            with pytest.raises(ConfigError, match=name):
                await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, **{name: value})
        with pytest.raises(ConfigError, match="heartbeat_stats"):
            await store.update_worker("worker", heartbeat_stats=["x"])  # type: ignore[arg-type] # intended
        with pytest.raises(ConfigError, match="attempt_ids"):
            await store.update_worker("worker", attempt_ids=[7])  # type: ignore[list-item] # intended
        assert await latest_attempt(store, claimed) == claimed.attempt

    async def test_a_late_result_is_kept_on_the_attempt_only(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed, "timeout")
        late = await finish(store, claimed, "succeeded")
        assert (late.status, late.late_status) == ("timeout", "succeeded")
        assert (await read(store, claimed.rollout_id)).status == "failed"

    async def test_a_result_of_an_earlier_attempt_never_touches_the_rollout(self, store: LightningStore) -> None:
        first = await claim(store, config=RolloutConfig(max_attempts=2, retry_condition=["unresponsive"]))
        await finish(store, first, "unresponsive")
        second = await dequeue(store)
        late = await finish(store, first, "succeeded")
        assert (late.status, late.late_status) == ("unresponsive", "succeeded")
        now = await read_attempted(store, first.rollout_id)
        assert (now.status, now.attempt.attempt_id) == ("preparing", second.attempt.attempt_id)

    async def test_spans_of_an_ended_attempt_are_stored_but_do_not_revive_it(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed, "failed")
        before = await read(store, claimed.rollout_id)
        assert await store.add_span(make_span(claimed)) is not None
        assert await read(store, claimed.rollout_id) == before
        assert len(await store.query_spans(claimed.rollout_id)) == 1

    async def test_a_failed_rollout_can_be_attempted_again_by_hand(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed, "failed")
        again = await store.start_attempt(claimed.rollout_id, worker_id="worker-2")
        assert (again.status, again.attempt.sequence_id) == ("preparing", 2)
        assert again.end_time is None
        await finish(store, again)
        assert (await read(store, claimed.rollout_id)).status == "succeeded"

    async def test_an_attempt_begun_by_hand_takes_the_rollout_from_the_queue(self, store: LightningStore) -> None:
        queued = await store.enqueue_rollout("a")
        started = await store.start_attempt(queued.rollout_id)
        assert started.attempt.sequence_id == 1
        assert await store.dequeue_rollout() is None

    async def test_a_failed_rollout_can_be_queued_again(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed, "failed")
        queued = await store.retry_rollout(claimed.rollout_id)
        assert (queued.status, queued.end_time) == ("requeuing", None)
        again = await dequeue(store)
        assert (again.rollout_id, again.attempt.sequence_id) == (claimed.rollout_id, 2)

    async def test_cancelling_takes_a_rollout_from_the_queue(self, store: LightningStore) -> None:
        queued = await store.enqueue_rollout("a")
        cancelled = await store.cancel_rollout(queued.rollout_id)
        assert cancelled.status == "cancelled"
        assert cancelled.end_time is not None
        assert await store.dequeue_rollout() is None
        assert (await store.cancel_rollout(queued.rollout_id)).end_time == cancelled.end_time

    async def test_cancelling_a_rollout_ends_its_live_attempt(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.cancel_rollout(claimed.rollout_id)
        cancelled = await read_attempted(store, claimed.rollout_id)
        assert (cancelled.status, cancelled.attempt.status) == ("cancelled", "failed")
        late = await finish(store, claimed, "succeeded")
        assert late.late_status == "succeeded"
        assert (await read(store, claimed.rollout_id)).status == "cancelled"

    async def test_an_attempt_past_its_timeout_ends_by_itself(self, store: LightningStore) -> None:
        claimed = await claim(store, config=RolloutConfig(timeout_seconds=0.3))
        await store.add_span(make_span(claimed))
        (ended,) = await soon(store.wait_for_rollouts([claimed.rollout_id]))
        assert ended.status == "failed"
        attempt = await latest_attempt(store, claimed)
        assert attempt.status == "timeout"
        assert attempt.end_time is not None
        assert attempt.end_time - attempt.start_time >= 0.3

    async def test_a_silent_attempt_is_given_to_another_worker(self, store: LightningStore) -> None:
        config = RolloutConfig(unresponsive_seconds=0.3, max_attempts=2, retry_condition=["unresponsive"])
        claimed = await claim(store, config=config)
        again = await soon(dequeue(store, "worker-2", timeout=20))
        assert (again.rollout_id, again.attempt.sequence_id) == (claimed.rollout_id, 2)
        statuses = [attempt.status for attempt in await store.query_attempts(claimed.rollout_id)]
        assert statuses == ["unresponsive", "preparing"]

    async def test_spans_and_heartbeats_keep_an_attempt_alive(self, store: LightningStore) -> None:
        status = ""
        for limit_s in (0.4, 2.0, 10.0):  # a machine may stop for longer than a limit, but not for all of them
            config = RolloutConfig(unresponsive_seconds=limit_s)
            alive = await store.start_rollout("alive", config=config)
            for _ in range(2):  # attempts that began later are lost one after the other
                silent = await store.start_rollout("silent", config=config)
                while (await read(store, silent.rollout_id)).status == "preparing":
                    await store.add_span(make_span(alive))
                    await asyncio.sleep(0.05)
            status = (await read(store, alive.rollout_id)).status
            if status == "running":
                break
        assert status == "running"

    async def test_writers_refuse_unknown_ids(self, store: LightningStore) -> None:
        queued = await store.enqueue_rollout("a")
        for call in (store.start_attempt, store.cancel_rollout, store.retry_rollout, store.update_rollout):
            with pytest.raises(NotFoundError, match="ro-unknown"):
                await call("ro-unknown")
        with pytest.raises(NotFoundError, match="ro-unknown"):
            await store.update_attempt("ro-unknown", "latest", status="succeeded")
        with pytest.raises(NotFoundError, match="latest"):
            await store.update_attempt(queued.rollout_id, "latest", status="succeeded")
        with pytest.raises(NotFoundError, match="at-unknown"):
            await store.update_attempt(queued.rollout_id, "at-unknown", status="succeeded")
        with pytest.raises(NotFoundError, match="run-unknown"):
            await store.update_run("run-unknown", "succeeded")

    async def test_only_ended_rollouts_can_be_deleted(self, store: LightningStore) -> None:
        done, open_ = await claim(store), await claim(store)
        await store.add_many_spans([make_span(done), make_span(open_)])
        await finish(store, done)
        with pytest.raises(ConflictError, match=open_.rollout_id):
            await store.delete_rollouts([done.rollout_id, open_.rollout_id])
        assert len(await store.query_rollouts()) == 2
        assert await store.delete_rollouts([done.rollout_id, "ro-unknown", done.rollout_id]) == 1
        assert await store.get_rollout_by_id(done.rollout_id) is None
        assert list(await store.query_attempts(done.rollout_id)) == []
        assert list(await store.query_spans(done.rollout_id)) == []
        assert len(await store.query_spans(open_.rollout_id)) == 1
        statistics = await store.statistics()
        assert (statistics["rollouts"], statistics["attempts"], statistics["spans"]) == (1, 1, 1)

    async def test_rollouts_are_deleted_by_age_count_and_status(self, store: LightningStore) -> None:
        ended: list[AttemptedRollout] = []
        for status in ("succeeded", "failed", "succeeded", "failed", "succeeded"):
            claimed = await claim(store)
            await finish(store, claimed, status)
            ended.append(claimed)
        open_ = await store.enqueue_rollout("open")
        elsewhere = await claim(store.with_run("other"))
        await finish(store, elsewhere)

        async def left() -> list[int]:
            ids = [rollout.rollout_id for rollout in ended]
            return [ids.index(rollout.rollout_id) for rollout in await store.query_rollouts(rollout_id_in=ids)]

        second = await read(store, ended[1].rollout_id)
        assert second.end_time is not None
        assert await store.delete_rollouts(ended_before=second.end_time) == 1
        assert await left() == [1, 2, 3, 4]
        assert await store.delete_rollouts(status_in=["failed"], keep=1) == 1
        assert await left() == [2, 3, 4]
        assert await store.delete_rollouts(keep=2) == 1
        assert await left() == [3, 4]
        assert await store.delete_rollouts(status_in=["succeeded"]) == 1
        assert await left() == [3]
        assert await store.delete_rollouts(keep=0) == 1
        assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [open_.rollout_id]
        assert await read(store, elsewhere.rollout_id) is not None

    async def test_a_deletion_with_invalid_arguments_is_refused(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed)
        with pytest.raises(ConfigError, match="rollout_ids"):
            await store.delete_rollouts()
        with pytest.raises(ConfigError, match="keep"):
            await store.delete_rollouts([claimed.rollout_id], keep=0)
        with pytest.raises(ConfigError, match="keep"):
            await store.delete_rollouts(keep=-1)
        with pytest.raises(ConfigError, match="succeeded"):
            await store.delete_rollouts(status_in=["queuing"])
        assert await read(store, claimed.rollout_id) is not None
        assert await store.delete_rollouts([]) == 0
