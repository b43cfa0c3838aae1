"""The queue: order, atomic claims, idempotent enqueueing, and the workers that hold claims."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.event import AttemptRevoked
from agentlightning.records import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import (
    PATIENCE_S,
    claim,
    close,
    dequeue,
    finish,
    get_worker,
    in_other_thread,
    make_span,
    next_event,
    read,
    read_attempted,
    soon,
    subscribe,
)


class QueueingTests:
    """Tests of enqueueing, claiming, and the workers that hold claims."""

    async def test_rollouts_are_claimed_in_the_order_they_were_enqueued(self, store: LightningStore) -> None:
        one = await store.enqueue_rollout("one")
        several = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(20)])
        last = await store.enqueue_rollout("last")
        queued = [rollout.rollout_id for rollout in (one, *several, last)]
        claimed = [await store.dequeue_rollout() for _ in range(3)]
        claimed += await store.dequeue_many_rollouts(limit=100)
        assert [rollout.rollout_id for rollout in claimed if rollout is not None] == queued

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

    async def test_a_claim_takes_no_more_than_its_limit(self, store: LightningStore) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5)])
        assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=2)] == [0, 1]
        assert list(await store.dequeue_many_rollouts(limit=0)) == []
        assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=9)] == [2, 3, 4]
        with pytest.raises(ConfigError):
            await store.dequeue_many_rollouts(limit=-1)

    async def test_a_claimed_rollout_is_never_handed_out_twice(self, store: LightningStore) -> None:
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(200)])

        async def claim_all(worker: int) -> list[str]:
            mine: list[str] = []
            while claimed := await store.dequeue_many_rollouts(limit=1 + worker % 3, worker_id=f"worker-{worker}"):
                mine += [rollout.rollout_id for rollout in claimed]
            return mine

        claims = Counter(chain(*await soon(asyncio.gather(*(claim_all(worker) for worker in range(50))))))
        assert claims == Counter(rollout.rollout_id for rollout in queued)

    async def test_threads_share_a_queue_without_duplicates(self, store: LightningStore) -> None:
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(60)])

        async def claim_all() -> list[str]:
            mine: list[str] = []
            while (claimed := await store.dequeue_rollout()) is not None:
                mine.append(claimed.rollout_id)
            return mine

        claims = Counter(chain(*await asyncio.gather(*(in_other_thread(claim_all) for _ in range(4)))))
        assert claims == Counter(rollout.rollout_id for rollout in queued)

    async def test_enqueueing_a_known_id_again_returns_the_stored_rollout(self, store: LightningStore) -> None:
        request = EnqueueRolloutRequest(input="a", rollout_id="chosen-1")
        (first,) = await store.enqueue_many_rollouts([request])
        again = await store.enqueue_many_rollouts([request, EnqueueRolloutRequest(input="b"), request])
        assert first.rollout_id == "chosen-1"
        assert [rollout.rollout_id for rollout in again] == ["chosen-1", again[1].rollout_id, "chosen-1"]
        assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=9)] == ["a", "b"]
        (running,) = await store.enqueue_many_rollouts([request])
        assert running.status == "preparing"
        assert await store.dequeue_rollout() is None

    async def test_enqueueing_many_is_all_or_none(self, store: LightningStore) -> None:
        requests = [EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=2, resources_id="rs-unknown")]
        with pytest.raises(NotFoundError):
            await store.enqueue_many_rollouts(requests)
        assert await store.dequeue_rollout() is None
        assert (await store.statistics())["rollouts"] == 0

    async def test_every_run_has_a_queue_of_its_own(self, store: LightningStore) -> None:
        other = store.with_run("other")
        mine = await store.enqueue_rollout("mine")
        theirs = await other.enqueue_rollout("theirs")
        assert (mine.run_id, theirs.run_id) == (store.run_id, "other")
        assert [rollout.input for rollout in await other.dequeue_many_rollouts(limit=9)] == ["theirs"]
        assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=9)] == ["mine"]
        assert [rollout.input for rollout in await other.query_rollouts()] == ["theirs"]
        assert [rollout.input for rollout in await store.query_rollouts(run_id="other")] == ["theirs"]

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

    async def test_a_retried_rollout_goes_to_the_end_of_the_queue(self, store: LightningStore) -> None:
        claimed = await claim(store, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
        waiting = await store.enqueue_rollout("waiting")
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed")
        order = [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)]
        assert order == [waiting.rollout_id, claimed.rollout_id]

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
