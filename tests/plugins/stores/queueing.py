"""The queue and the life of a claim: order, atomic claims, concurrent changes, deadlines, deletion."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import chain
from typing import Any

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.primitives import in_other_thread, soon
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from tests.plugins.stores.actions import claim, finish, latest_attempt, make_span, read_attempted


class QueueingTests:
    """Tests of enqueueing, claiming, deadlines and deletion."""

    async def test_rollouts_are_claimed_in_the_order_they_were_enqueued(self, store: LightningStore) -> None:
        one = await store.enqueue_rollout("one")
        several = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(20)])
        last = await store.enqueue_rollout("last")
        queued = [rollout.rollout_id for rollout in (one, *several, last)]
        claimed = [await store.dequeue_rollout() for _ in range(3)]
        claimed += await store.dequeue_many_rollouts(limit=100)
        assert [rollout.rollout_id for rollout in claimed if rollout is not None] == queued

    async def test_the_highest_priority_is_claimed_first_also_after_a_retry(self, store: LightningStore) -> None:
        for number, priority in enumerate([0, -1, 3, 0, 3]):
            queued = await store.enqueue_rollout(number, priority=priority)
            assert queued.priority == priority
        first = await store.dequeue_rollout()
        assert first is not None
        await store.release_attempt(first.rollout_id, first.attempt.attempt_id)  # behind the other one of priority 3
        assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=9)] == [4, 2, 0, 3, 1]
        ordered = await store.query_rollouts(sort_by="priority", sort_order="desc")
        assert [rollout.priority for rollout in ordered] == [3, 3, 0, 0, -1]
        with pytest.raises(ValueError, match="priority"):
            await store.enqueue_rollout("one", priority=2**63)

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

    async def test_a_retried_rollout_goes_to_the_end_of_the_queue(self, store: LightningStore) -> None:
        claimed = await claim(store, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
        waiting = await store.enqueue_rollout("waiting")
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed")
        order = [rollout.rollout_id for rollout in await store.dequeue_many_rollouts(limit=9)]
        assert order == [waiting.rollout_id, claimed.rollout_id]

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

    async def test_an_attempt_past_its_timeout_ends_by_itself(self, store: LightningStore) -> None:
        claimed = await claim(store, config=RolloutConfig(timeout_seconds=0.3))
        await store.add_span(make_span(claimed))
        (ended,) = await soon(store.wait_for_rollouts([claimed.rollout_id]))
        assert ended.status == "failed"
        attempt = await latest_attempt(store, claimed)
        assert attempt.status == "timeout"
        assert attempt.end_time is not None
        assert attempt.end_time - attempt.start_time >= 0.3

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
