"""The semantics of stores that ``core/store/engine`` decides, on whichever backend it runs.

The conformance kit of ``agentlightning.testing`` tests what an author's backend can get wrong; this is tested with our
own stores.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Any, Final

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.event import AttemptRevoked
from agentlightning.resources import PromptTemplate
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.model import Reopen
from agentlightning.testing.store.primitives import PATIENCE_S, in_other_thread, soon
from agentlightning.types import (
    UNSET,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    SpanEvent,
    Worker,
)
from tests.plugins.stores.actions import (
    claim,
    close,
    dequeue,
    finish,
    latest_attempt,
    make_span,
    next_event,
    read,
    read_attempted,
    subscribe,
)
from tests.plugins.stores.queueing import QueueingTests
from tests.plugins.stores.reading import ReadingTests
from tests.plugins.stores.waiting import WaitingTests, begin

NOT_JSON: Final[dict[str, Any]] = {
    "nan": float("nan"),
    "infinity": float("-inf"),
    "set": {1},
    "date": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "bytes": b"\x00",
    "huge integer": 2**63,
    "lone surrogate": "\ud800",
    "key": {1: "a"},
    "object": object(),
}


async def get_worker(store: LightningStore, worker_id: str) -> Worker:
    worker = await store.get_worker_by_id(worker_id)
    assert worker is not None
    return worker


class EngineSemantics(QueueingTests, WaitingTests, ReadingTests):
    """Tests of statuses, retries, resources, workers and invalid arguments, with one fixture: ``store``."""

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

    async def test_an_unknown_status_is_refused(self, store: LightningStore) -> None:
        claimed = await claim(store)
        with pytest.raises(ConfigError):
            await store.update_attempt(claimed.rollout_id, "latest", status="done")
        with pytest.raises(ConfigError):
            await store.update_rollout(claimed.rollout_id, status="done")
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
            await store.update_worker("worker", heartbeat_stats=["x"])
        with pytest.raises(ConfigError, match="attempt_ids"):
            await store.update_worker("worker", attempt_ids=[7])
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

    async def test_an_id_of_another_run_cannot_be_enqueued(self, store: LightningStore) -> None:
        request = EnqueueRolloutRequest(input="a", rollout_id="chosen-1")
        await store.enqueue_many_rollouts([request])
        with pytest.raises(ConflictError):
            await store.with_run("other").enqueue_many_rollouts([request])

    async def test_a_started_rollout_bypasses_the_queue(self, store: LightningStore) -> None:
        waiting = await store.enqueue_rollout("waiting")
        started = await store.start_rollout("started", mode="val", worker_id="worker-1")
        assert (started.status, started.attempt.sequence_id) == ("preparing", 1)
        assert started.attempt.worker_id == "worker-1"
        assert await read(store, started.rollout_id) == started
        assert [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)] == [waiting.rollout_id]

    async def test_a_rollout_pins_the_newest_resources(self, store: LightningStore) -> None:
        bare = await store.enqueue_rollout("before any")
        first = await store.add_resources({"prompt": "Think."})
        pinned = await store.enqueue_rollout("after the first")
        await store.with_run("other").add_resources({"prompt": "Of another run."})
        second = await store.add_resources({"prompt": "Think twice."})
        chosen = await store.enqueue_rollout("chosen", resources_id=first.resources_id)
        started = await store.start_rollout("started")
        assert bare.resources_id is None
        assert pinned.resources_id == chosen.resources_id == first.resources_id
        assert started.resources_id == second.resources_id

    async def test_unknown_resources_are_refused(self, store: LightningStore) -> None:
        with pytest.raises(NotFoundError, match="rs-unknown"):
            await store.enqueue_rollout("a", resources_id="rs-unknown")
        with pytest.raises(NotFoundError, match="rs-unknown"):
            await store.start_rollout("a", resources_id="rs-unknown")
        queued = await store.enqueue_rollout("b")
        with pytest.raises(NotFoundError, match="rs-unknown"):
            await store.update_rollout(queued.rollout_id, resources_id="rs-unknown")
        assert (await store.statistics())["rollouts"] == 1

    async def test_a_released_claim_goes_to_another_worker(self, store: LightningStore) -> None:
        claimed = await claim(store, "worker-1")
        waiting = asyncio.create_task(store.dequeue_rollout("worker-2", timeout=PATIENCE_S))
        await asyncio.sleep(0.05)
        released = await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
        assert isinstance(released, AttemptedRollout)
        assert (released.status, released.attempt.status) == ("requeuing", "unresponsive")
        assert released.attempt.error is not None
        assert released.attempt.error.type == "Released"
        again = await waiting
        assert again is not None
        assert (again.rollout_id, again.attempt.sequence_id) == (claimed.rollout_id, 2)
        worker = await get_worker(store, "worker-1")
        assert (worker.status, worker.current_attempt_id) == ("idle", None)

    async def test_releasing_a_claim_twice_is_harmless(self, store: LightningStore) -> None:
        claimed = await claim(store)
        first = await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
        assert await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id) == first
        assert len(await store.dequeue_many_rollouts(limit=9)) == 1

    async def test_an_attempt_that_has_begun_cannot_be_released(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.add_span(make_span(claimed))
        before = await read(store, claimed.rollout_id)
        with pytest.raises(ConflictError, match="running"):
            await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
        assert await read(store, claimed.rollout_id) == before

    async def test_the_attempts_of_a_dead_worker_end_immediately(self, store: LightningStore) -> None:
        config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
        idle, busy, other = await claim(store, "dead"), await claim(store, "dead", config), await claim(store, "alive")
        await store.add_span(make_span(busy))
        assert await store.end_worker("dead") == 2
        for claimed in (idle, busy):
            now = await read_attempted(store, claimed.rollout_id)
            assert (now.status, now.attempt.status) == ("requeuing", "unresponsive")
        assert await read(store, other.rollout_id) == other
        worker = await get_worker(store, "dead")
        assert (worker.status, worker.current_attempt_id) == ("unknown", None)
        assert await store.end_worker("dead") == 0
        assert await store.end_worker("unknown") == 0
        assert await store.get_worker_by_id("unknown") is None

    async def test_a_dead_worker_gets_no_more_work(self, store: LightningStore) -> None:
        before = await claim(store, "dead")
        waiting = asyncio.create_task(store.dequeue_rollout("dead", timeout=PATIENCE_S))
        await store.end_worker("dead")
        assert (await store.update_worker("dead")).status == "unknown"
        with pytest.raises(ConflictError, match="another worker_id"):
            await waiting
        with pytest.raises(ConflictError, match="another worker_id"):
            await store.start_attempt(before.rollout_id, "dead")
        claimed = await dequeue(store, "alive")
        assert claimed.rollout_id == before.rollout_id

    async def test_a_heartbeat_that_names_attempts_returns_the_live_ones(self, store: LightningStore) -> None:
        one, two, three = [await claim(store, "worker-1") for _ in range(3)]
        given = [one.attempt.attempt_id, two.attempt.attempt_id, "at-unknown"]
        assert (await store.update_worker("worker-1")).attempt_ids is None
        named = await store.update_worker("worker-1", attempt_ids=given)
        assert named.attempt_ids is not None
        assert sorted(named.attempt_ids) == sorted(given[:2])
        await finish(store, one)
        await store.cancel_rollout(two.rollout_id)
        assert (await store.update_worker("worker-1")).attempt_ids == []
        given = [claimed.attempt.attempt_id for claimed in (one, two, three)]
        assert (await store.update_worker("worker-1", attempt_ids=given)).attempt_ids == [three.attempt.attempt_id]
        found = await store.get_worker_by_id("worker-1")
        assert found is not None
        assert found.attempt_ids == [three.attempt.attempt_id]
        assert (await store.update_worker("worker-1", attempt_ids=None)).attempt_ids is None

    async def test_an_invalid_run_id_is_refused(self, store: LightningStore) -> None:
        for run_id in ("", "\u00e9", "a b", "a/b", "a\n", "x" * 201):
            with pytest.raises(ConfigError, match="run_id"):
                store.with_run(run_id)
            with pytest.raises(ConfigError, match="run_id"):
                await store.create_run("name", run_id=run_id)

    async def test_an_earlier_version_can_be_published_again(self, store: LightningStore) -> None:
        first = await store.update_resources("tuned", {"prompt": "one"})
        await store.update_resources("tuned", {"prompt": "two"})
        await store.add_resources({"prompt": "another"})
        back = await store.rollback("tuned", 1)
        assert (back.version, back.resources) == (3, first.resources)
        assert await store.get_latest_resources() == back
        assert await store.get_resources_by_id("tuned", 1) == first
        for resources_id, version in (("tuned", 9), ("rs-unknown", 1)):
            with pytest.raises(NotFoundError, match=resources_id):
                await store.rollback(resources_id, version)
        assert len(await store.query_resources(resources_id="tuned")) == 3

    async def test_a_rollout_can_be_pinned_to_one_version_of_resources(self, store: LightningStore) -> None:
        first = await store.update_resources("tuned", {"prompt": "one"})
        second = await store.update_resources("tuned", {"prompt": "two"})
        assert (first.version_id, second.version_id) == ("tuned@1", "tuned@2")
        assert await store.get_resources_by_id("tuned@1") == first
        assert await store.get_resources_by_id("tuned@2", 2) == second
        assert await store.get_resources_by_id("tuned@3") is None
        pinned = await store.enqueue_rollout("a", resources_id="tuned@1")
        begun = await store.start_rollout("b", resources_id="tuned@2")
        assert [(await read(store, r.rollout_id)).resources_id for r in (pinned, begun)] == ["tuned@1", "tuned@2"]
        moved = await store.update_rollout(pinned.rollout_id, resources_id="tuned@2")
        assert moved.resources_id == "tuned@2"
        for unknown in ("tuned@3", "other@1", "tuned@0", "tuned@x"):
            with pytest.raises(NotFoundError, match=unknown):
                await store.enqueue_rollout("c", resources_id=unknown)
            with pytest.raises(NotFoundError, match=unknown):
                await store.update_rollout(pinned.rollout_id, resources_id=unknown)
        with pytest.raises(ConfigError, match="tuned@2"):
            await store.update_resources("tuned@2", {"prompt": "three"})
        assert len(await store.query_resources()) == 2

    async def test_any_version_can_be_made_the_latest(self, store: LightningStore) -> None:
        stable = await store.update_resources("stable", {"prompt": "one"})
        better = await store.update_resources("better", {"prompt": "two"})
        assert await store.promote("better") == better
        assert len(await store.query_resources()) == 2
        back = await store.promote("stable", 1)
        assert (back.version_id, back.resources) == ("stable@2", stable.resources)
        assert await store.get_latest_resources() == back
        again = await store.promote("better@1")
        assert (again.version_id, again.resources) == ("better@2", better.resources)
        other = store.with_run("other")
        copied = await other.promote("better@1")
        assert (copied.run_id, copied.version, copied.resources) == ("other", 1, better.resources)
        assert await other.get_latest_resources() == copied
        assert await store.get_latest_resources() == again
        for unknown in ("stable@9", "rs-unknown"):
            with pytest.raises(NotFoundError, match=unknown):
                await store.promote(unknown)

    async def test_a_value_that_is_not_a_resource_is_refused(self, store: LightningStore) -> None:
        with pytest.raises(ConfigError, match="prompt"):
            await store.add_resources({"prompt": 3})
        assert await store.get_latest_resources() is None

    async def test_unset_and_none_differ(self, store: LightningStore) -> None:
        await store.add_resources({"prompt": "one"})
        config = RolloutConfig(max_attempts=2)
        queued = await store.enqueue_rollout("a", mode="train", config=config, metadata={"step": 1})
        kept = await store.update_rollout(queued.rollout_id, mode=UNSET, input="b")
        assert kept.model_dump() == {**queued.model_dump(), "input": "b"}
        cleared = await store.update_rollout(queued.rollout_id, mode=None, resources_id=None, metadata=None, input=None)
        assert (cleared.input, cleared.mode, cleared.resources_id, cleared.metadata) == (None, None, None, None)
        assert (cleared.config, cleared.status) == (config, "queuing")
        assert await read(store, queued.rollout_id) == cleared

    async def test_an_attempt_keeps_fields_that_are_not_given(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.update_attempt(claimed.rollout_id, "latest", metadata={"a": 1}, worker_id="worker-1")
        attempt = await store.update_attempt(
            claimed.rollout_id, "latest", spans_dropped=2, reward=0.5, last_heartbeat_time=5.0
        )
        assert (attempt.metadata, attempt.worker_id, attempt.spans_dropped) == ({"a": 1}, "worker-1", 2)
        assert attempt.reward == 0.5
        assert (attempt.last_heartbeat_time, attempt.status) == (5.0, "preparing")
        cleared = await store.update_attempt(claimed.rollout_id, "latest", metadata=None)
        assert (cleared.metadata, cleared.spans_dropped) == (None, 2)

    async def test_changing_an_argument_later_changes_no_record(self, store: LightningStore) -> None:
        task: dict[str, Any] = {"messages": ["hello"]}
        metadata: dict[str, Any] = {"tags": ["a"]}
        rollout = await store.enqueue_rollout(task, metadata=metadata)
        task["messages"].append("changed")
        metadata["tags"].append("changed")
        claimed = await dequeue(store)
        attributes: dict[str, Any] = {"list": [1]}
        span = make_span(claimed, **attributes)
        await store.add_span(span)
        attributes["list"].append(2)
        resources: dict[str, Any] = {"prompt": "one"}
        await store.add_resources(resources)
        resources["prompt"] = "changed"
        stored = await read(store, rollout.rollout_id)
        assert (stored.input, stored.metadata) == ({"messages": ["hello"]}, {"tags": ["a"]})
        assert (await store.query_spans(rollout.rollout_id))[0].attributes["list"] == [1]
        latest = await store.get_latest_resources()
        assert latest is not None
        assert latest.resources["prompt"] == PromptTemplate("one")

    async def test_returned_records_are_immutable(self, store: LightningStore) -> None:
        rollout = await store.enqueue_rollout({"messages": ["hello"]}, metadata={"group": "g"})
        update = await store.add_resources({"prompt": "one"})
        with pytest.raises(TypeError):
            rollout.input["messages"].append("changed")
        with pytest.raises(TypeError):
            rollout.metadata["group"] = "changed"
        with pytest.raises(TypeError):
            update.resources["prompt"] = PromptTemplate("changed")
        with pytest.raises(ValueError, match="frozen"):
            rollout.status = "failed"

    async def test_a_worker_is_busy_while_it_has_an_attempt(self, store: LightningStore) -> None:
        await store.enqueue_rollout("a")
        await store.enqueue_rollout("b")
        one = await store.dequeue_rollout("worker-1")
        two = await store.dequeue_rollout("worker-1")
        assert one is not None
        assert two is not None
        busy = await get_worker(store, "worker-1")
        assert (busy.status, busy.current_attempt_id) == ("busy", two.attempt.attempt_id)
        assert busy.last_dequeue_time is not None
        await finish(store, two)
        still_busy = await get_worker(store, "worker-1")
        assert (still_busy.status, still_busy.current_rollout_id) == ("busy", one.rollout_id)
        await finish(store, one, "failed")
        idle = await get_worker(store, "worker-1")
        assert (idle.status, idle.current_rollout_id, idle.current_attempt_id) == ("idle", None, None)
        assert idle.last_idle_time is not None

    async def test_a_heartbeat_keeps_fields_that_are_not_given(self, store: LightningStore) -> None:
        first = await store.update_worker("worker-1", {"cpu": [0.5]})
        second = await store.update_worker("worker-1")
        assert second.heartbeat_stats == {"cpu": [0.5]}
        assert first.last_heartbeat_time is not None
        assert second.last_heartbeat_time is not None
        assert second.last_heartbeat_time >= first.last_heartbeat_time
        assert (await store.update_worker("worker-1", None)).heartbeat_stats is None
        await store.update_worker("worker-2")
        assert [worker.worker_id for worker in await store.query_workers(sort_by="worker_id")] == [
            "worker-1",
            "worker-2",
        ]
        assert len(await store.query_workers(status_in=["busy"])) == 0
        assert [worker.worker_id for worker in await store.query_workers(worker_id_contains="-2")] == ["worker-2"]

    async def test_creating_a_run_again_returns_the_stored_run(self, store: LightningStore) -> None:
        run = await store.create_run("try", config={"lr": 0.1}, metadata={"note": "x"})
        assert (run.run_id, run.name, run.status, run.config) == (store.run_id, "try", "running", {"lr": 0.1})
        assert await store.create_run("again") == run
        other = await store.create_run("other", run_id="run-2")
        assert list(await store.query_runs()) == [run, other]
        assert await store.get_run_by_id("run-2") == other
        assert await store.get_run_by_id("run-unknown") is None
        assert (await store.query_runs(limit=1)).total == 2
        ended = await store.update_run("run-2", "succeeded")
        assert (ended.status, ended.name) == ("succeeded", "other")

    @pytest.mark.parametrize("value", NOT_JSON.values(), ids=NOT_JSON)
    async def test_values_that_are_not_json_are_refused(self, store: LightningStore, value: Any) -> None:
        given = {"part": [value]}
        with pytest.raises(ConfigError, match=r"input\.part\[0\]"):
            await store.enqueue_rollout(given)
        with pytest.raises(ConfigError, match=r"input\.part\[0\]"):
            await store.start_rollout(given)
        with pytest.raises(ConfigError, match=r"metadata\.part\[0\]"):
            await store.enqueue_rollout("a", metadata=given)
        with pytest.raises(ConfigError, match=r"heartbeat_stats\.part\[0\]"):
            await store.update_worker("worker-1", given)
        with pytest.raises(ConfigError, match=r"config\.part\[0\]"):
            await store.create_run("a", config=given)
        assert list(await store.query_rollouts()) == []
        assert list(await store.query_workers()) == []
        assert list(await store.query_runs()) == []
        claimed = await claim(store)
        with pytest.raises(ConfigError, match=r"input\.part\[0\]"):
            await store.update_rollout(claimed.rollout_id, input=given, mode="test")
        with pytest.raises(ConfigError, match=r"metadata\.part\[0\]"):
            await store.update_rollout(claimed.rollout_id, metadata=given, mode="test")
        with pytest.raises(ConfigError, match=r"metadata\.part\[0\]"):
            await store.update_attempt(claimed.rollout_id, "latest", status="running", metadata=given)
        assert await read(store, claimed.rollout_id) == claimed

    async def test_a_metric_that_is_not_finite_is_left_out(self, store: LightningStore) -> None:
        metrics = await store.add_metrics(1, {"loss": float("nan"), "reward": 0.5, "norm": float("inf")})
        assert metrics.values == {"reward": 0.5}
        assert [item.values for item in await store.query_metrics()] == [{"reward": 0.5}]

    async def test_a_span_with_a_value_of_the_wrong_type_is_refused(self, store: LightningStore) -> None:
        claimed = await claim(store)
        wrong: dict[str, Any] = {"sequence_id": "1", "start_time": "x", "end_time": float("nan"), "name": None}
        for name, value in wrong.items():
            with pytest.raises(ConfigError, match=name):
                await store.add_span(make_span(claimed).model_copy(update={name: value}))
        assert list(await store.query_spans(claimed.rollout_id)) == []

    async def test_invalid_query_arguments_are_refused(self, store: LightningStore) -> None:
        await store.enqueue_rollout("a")
        with pytest.raises(ConfigError, match="start_time"):
            await store.query_rollouts(sort_by="start_tim")
        with pytest.raises(ConfigError, match="sequence_id"):
            await store.query_attempts("ro-unknown", sort_by="sequence")
        with pytest.raises(ConfigError, match="name"):
            await store.query_spans("ro-unknown", sort_by="nam")
        with pytest.raises(ConfigError):
            await store.query_rollouts(limit=-2)
        with pytest.raises(ConfigError):
            await store.query_rollouts(offset=-1)
        for too_large in (2**63, 10**30):
            with pytest.raises(ConfigError, match="limit"):
                await store.query_spans("ro-unknown", limit=too_large)
            with pytest.raises(ConfigError, match="offset"):
                await store.query_workers(offset=too_large)
            with pytest.raises(ConfigError, match="limit"):
                await store.dequeue_many_rollouts(limit=too_large)
            with pytest.raises(ConfigError, match="version"):
                await store.get_resources_by_id("rs-unknown", too_large)
            with pytest.raises(ConfigError, match="metadata"):
                await store.query_rollouts(metadata={"step": too_large})
            with pytest.raises(ConfigError, match="cursor"):
                await store.query_rollouts(cursor=f"{too_large}.1.1", limit=1)
        with pytest.raises(ConfigError):
            await store.query_rollouts(sort_order="up")
        with pytest.raises(ConfigError):
            await store.query_rollouts(filter_logic="xor")
        with pytest.raises(ConfigError, match="queuing"):
            await store.query_rollouts(status_in=["queueing"])

    async def test_a_waiting_claim_gives_up_after_its_timeout(self, store: LightningStore) -> None:
        start = time.monotonic()
        assert await soon(store.dequeue_rollout(timeout=0.1)) is None
        assert time.monotonic() - start > 0.09
        with pytest.raises(ConfigError):
            await store.dequeue_rollout(timeout=-1)

    async def test_a_waiting_claim_gets_a_rollout_that_is_queued_again(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await finish(store, claimed, "failed")
        waiting = await begin(store.dequeue_rollout(timeout=PATIENCE_S))
        await store.retry_rollout(claimed.rollout_id)
        again = await soon(waiting)
        assert again is not None
        assert (again.rollout_id, again.attempt.sequence_id) == (claimed.rollout_id, 2)

    async def test_a_cancelled_rollout_ends_a_wait(self, store: LightningStore) -> None:
        queued = await store.enqueue_rollout("a")
        waiting = await begin(store.wait_for_rollouts([queued.rollout_id]))
        await store.cancel_rollout(queued.rollout_id)
        assert [rollout.status for rollout in await soon(waiting)] == ["cancelled"]

    async def test_waiting_returns_the_rollouts_that_ended_in_time(self, store: LightningStore) -> None:
        done, open_ = await claim(store), await claim(store)
        await finish(store, done)
        ids = [open_.rollout_id, done.rollout_id]
        for timeout in (0, 0.1):
            ended = await soon(store.wait_for_rollouts(ids, timeout))
            assert [rollout.rollout_id for rollout in ended] == [done.rollout_id]
        assert list(await store.wait_for_rollouts(rollout_ids=[], timeout=None)) == []

    async def test_an_id_given_twice_is_returned_twice(self, store: LightningStore) -> None:
        claimed = await claim(store)
        waiting = await begin(store.wait_for_rollouts([claimed.rollout_id, claimed.rollout_id]))
        await finish(store, claimed)
        assert [rollout.rollout_id for rollout in await soon(waiting)] == [claimed.rollout_id] * 2

    async def test_waiting_for_an_unknown_rollout_is_refused(self, store: LightningStore) -> None:
        queued = await store.enqueue_rollout("a")
        with pytest.raises(NotFoundError, match="ro-unknown"):
            await store.wait_for_rollouts([queued.rollout_id, "ro-unknown"], timeout=PATIENCE_S)

    async def test_a_cancelled_wait_leaves_other_waits_alone(self, store: LightningStore) -> None:
        claimed = await claim(store)
        gone = asyncio.create_task(store.wait_for_rollouts([claimed.rollout_id]))
        stays = await begin(store.wait_for_rollouts([claimed.rollout_id]))
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await finish(store, claimed)
        assert len(await soon(stays)) == 1

    async def test_a_subscriber_gets_only_the_kinds_it_asked_for(self, store: LightningStore) -> None:
        events = await subscribe(store, ["step_finished"])
        await store.enqueue_rollout("a")
        await store.add_metrics(1, {"reward": 0.5})
        while (event := await next_event(events)).kind == "step_finished" and event.step == 0:
            pass
        assert event.kind == "step_finished"
        assert (event.step, event.values) == (1, {"reward": 0.5})
        await close(events)

    async def test_open_runs_are_those_with_queued_or_running_rollouts(self, store: LightningStore) -> None:
        queued, running, ended = (store.with_run(name) for name in ("queued", "running", "ended"))
        for view in (queued, running, ended):
            await view.create_run("named")
            await view.enqueue_rollout("task")
        await running.dequeue_rollout("worker")
        claimed = await ended.dequeue_rollout("worker")
        assert claimed is not None
        await finish(ended, claimed)
        await ended.update_run("ended", "succeeded")
        assert sorted(await store.find_open_runs()) == ["queued", "running"]

    async def test_a_subscriber_to_every_run_gets_the_events_of_other_runs(self, store: LightningStore) -> None:
        events = await subscribe(store, ["step_finished", "rollout_enqueued"], every_run=True)
        for run in ("team-a", "team-b"):
            await store.with_run(run).enqueue_rollout("task")
            assert (await next_event(events)).run_id == run
        await close(events)

    async def test_subscribing_to_an_unknown_kind_is_refused(self, store: LightningStore) -> None:
        with pytest.raises(ConfigError, match="rollout_finished"):
            await next_event(store.subscribe(["rollout_finish"]))

    async def test_an_event_reports_that_the_store_ended_an_attempt(self, store: LightningStore) -> None:
        events = await subscribe(store, ["step_finished", "attempt_revoked"])
        cancelled, lost = await claim(store), await claim(store, "dead")
        late = await claim(store, config=RolloutConfig(timeout_seconds=0.3))
        await store.cancel_rollout(cancelled.rollout_id)
        await store.end_worker("dead")
        reasons: dict[str, str] = {}
        while len(reasons) < 3:
            event = await next_event(events)
            if isinstance(event, AttemptRevoked):
                reasons[event.attempt_id] = event.reason
        assert reasons == {
            cancelled.attempt.attempt_id: "cancelled",
            lost.attempt.attempt_id: "unresponsive",
            late.attempt.attempt_id: "timeout",
        }
        await close(events)

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

    async def test_a_span_number_that_leaves_no_room_for_others_is_refused(self, store: LightningStore) -> None:
        claimed = await claim(store)
        span = make_span(claimed)
        for number in (2**53, 2**63 - 1, 2**63, -1):
            with pytest.raises(ConfigError, match="sequence_id"):
                await store.add_many_spans([make_span(claimed), span.model_copy(update={"sequence_id": number})])
        assert list(await store.query_spans(claimed.rollout_id)) == []
        for number in (2**53 - 1, 0, 0):
            assert await store.add_span(make_span(claimed).model_copy(update={"sequence_id": number})) is not None
        numbers = [span.sequence_id for span in await store.query_spans(claimed.rollout_id)]
        assert numbers == [2**53 - 1, 2**53, 2**53 + 1]

    async def test_getters_return_none_for_unknown_ids(self, store: LightningStore) -> None:
        assert await store.get_rollout_by_id("ro-unknown") is None
        assert await store.get_latest_attempt("ro-unknown") is None
        assert await store.get_resources_by_id("rs-unknown") is None
        assert await store.get_latest_resources() is None
        assert await store.get_worker_by_id("worker-unknown") is None
        assert list(await store.query_attempts("ro-unknown")) == []
        assert list(await store.query_spans("ro-unknown")) == []

    async def test_rollouts_come_with_their_latest_attempt(self, store: LightningStore) -> None:
        tried = await claim(store)
        await finish(store, tried, "failed")
        tried = await store.start_attempt(tried.rollout_id)
        queued = await store.enqueue_rollout("untried")
        first, second = await store.query_rollouts()
        assert isinstance(first, AttemptedRollout)
        assert first == tried
        assert second == queued
        assert await store.get_rollout_by_id(tried.rollout_id) == tried
        assert type(await store.get_rollout_by_id(queued.rollout_id)) is Rollout

    async def test_the_latest_resources_are_those_published_last_in_the_run(self, store: LightningStore) -> None:
        first = await store.add_resources({"prompt": "one"})
        second = await store.update_resources("named", {"prompt": "two"})
        await store.with_run("other").add_resources({"prompt": "theirs"})
        assert (second.resources_id, second.version) == ("named", 1)
        assert await store.get_latest_resources() == second
        bumped = await store.update_resources(first.resources_id, {"prompt": "three"})
        assert await store.get_latest_resources() == bumped
        assert [update.version for update in await store.query_resources()] == [1, 1, 2]
        assert [update.run_id for update in await store.with_run("other").query_resources()] == ["other"]

    async def test_a_span_with_values_that_are_not_json_is_stored(self, store: LightningStore) -> None:
        claimed = await claim(store)
        span = make_span(claimed, "broken \udc80 name", **NOT_JSON, fine=[1, None, "grüße"])
        event = SpanEvent(name="e", attributes={"loss": float("nan")})
        late = make_span(claimed).model_copy(update={"attributes": {"loss": float("inf")}, "events": [event]})
        await store.add_many_spans([span, late])
        found = await store.query_spans(claimed.rollout_id)
        assert len(found) == 2
        first, second = found
        kept = dict(first.attributes)
        assert "object" in kept.pop("object")
        assert kept == {
            "nan": "NaN",
            "infinity": "-Infinity",
            "set": [1],
            "date": "2026-01-02T03:04:05+00:00",
            "bytes": "\x00",
            "huge integer": str(2**63),
            "lone surrogate": "\\ud800",
            "key": {"1": "a"},
            "fine": [1, None, "grüße"],
        }
        assert first.name == "broken \\udc80 name"
        assert second.attributes == {"loss": "Infinity"}
        assert second.events[0].attributes == {"loss": "NaN"}

    async def test_a_claim_begins_the_first_attempt(self, store: LightningStore) -> None:
        queued = await store.enqueue_rollout({"question": "?"}, mode="train", metadata={"group": "g", "step": 3})
        assert queued.status == "queuing"
        assert queued.end_time is None
        claimed = await store.dequeue_rollout("worker-1")
        assert isinstance(claimed, AttemptedRollout)
        assert (claimed.rollout_id, claimed.input, claimed.mode) == (queued.rollout_id, {"question": "?"}, "train")
        assert claimed.metadata == {"group": "g", "step": 3}
        assert claimed.status == "preparing"
        assert (claimed.attempt.sequence_id, claimed.attempt.status) == (1, "preparing")
        assert (claimed.attempt.rollout_id, claimed.attempt.worker_id) == (queued.rollout_id, "worker-1")
        assert await read(store, queued.rollout_id) == claimed

    async def test_an_empty_queue_gives_nothing(self, store: LightningStore) -> None:
        assert await store.dequeue_rollout() is None
        assert list(await store.dequeue_many_rollouts(limit=3)) == []

    async def test_a_wait_notices_an_end_in_another_thread(self, store: LightningStore) -> None:
        claimed = await claim(store)
        waiting = await begin(store.wait_for_rollouts([claimed.rollout_id]))
        await in_other_thread(lambda: finish(store, claimed))
        assert [rollout.rollout_id for rollout in await soon(waiting)] == [claimed.rollout_id]


class DurableSemantics(EngineSemantics):
    """Tests of durable stores, with a second fixture: ``reopen``."""

    async def test_a_deadline_is_enforced_after_reopening(self, store: LightningStore, reopen: Reopen) -> None:
        claimed = await claim(store, config=RolloutConfig(timeout_seconds=0.5))
        store = await reopen()
        (ended,) = await soon(store.wait_for_rollouts([claimed.rollout_id]))
        assert ended.status == "failed"
