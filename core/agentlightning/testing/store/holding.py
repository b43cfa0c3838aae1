"""Who holds an attempt: workers, leases, claims that are handed back."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.errors import ConflictError
from agentlightning.event import AttemptRevoked
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.step import PATIENCE_S, claim, close, finish, make_span, next_event, read, subscribe
from agentlightning.types import AttemptedRollout, RolloutConfig


class HoldingTests:
    """Sentences about claims and the workers that hold them."""

    async def test_a_claim_that_is_handed_back_goes_to_another_worker(self, store: LightningStore) -> None:
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
        worker = await store.get_worker_by_id("worker-1")
        assert worker is not None
        assert (worker.status, worker.current_attempt_id) == ("idle", None)

    async def test_handing_back_twice_is_harmless(self, store: LightningStore) -> None:
        claimed = await claim(store)
        first = await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
        assert await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id) == first
        assert len(await store.dequeue_many_rollouts(limit=9)) == 1

    async def test_an_attempt_that_has_begun_cannot_be_handed_back(self, store: LightningStore) -> None:
        claimed = await claim(store)
        await store.add_span(make_span(claimed))
        before = await read(store, claimed.rollout_id)
        with pytest.raises(ConflictError, match="running"):
            await store.release_attempt(claimed.rollout_id, claimed.attempt.attempt_id)
        assert await read(store, claimed.rollout_id) == before

    async def test_the_attempts_of_a_dead_worker_end_at_once(self, store: LightningStore) -> None:
        config = RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])
        idle, busy, other = await claim(store, "dead"), await claim(store, "dead", config), await claim(store, "alive")
        await store.add_span(make_span(busy))
        assert await store.end_worker("dead") == 2
        for claimed in (idle, busy):
            now = await read(store, claimed.rollout_id)
            assert isinstance(now, AttemptedRollout)
            assert (now.status, now.attempt.status) == ("requeuing", "unresponsive")
        assert await read(store, other.rollout_id) == other
        worker = await store.get_worker_by_id("dead")
        assert worker is not None
        assert (worker.status, worker.current_attempt_id) == ("unknown", None)
        assert await store.end_worker("dead") == 0
        assert await store.end_worker("nobody") == 0
        assert await store.get_worker_by_id("nobody") is None

    async def test_a_dead_worker_gets_no_more_work(self, store: LightningStore) -> None:
        before = await claim(store, "dead")
        waiting = asyncio.create_task(store.dequeue_rollout("dead", timeout=PATIENCE_S))
        await store.end_worker("dead")
        assert (await store.update_worker("dead")).status == "unknown"
        with pytest.raises(ConflictError, match="another worker_id"):
            await waiting
        with pytest.raises(ConflictError, match="another worker_id"):
            await store.start_attempt(before.rollout_id, "dead")
        claimed = await store.dequeue_rollout("alive")
        assert claimed is not None
        assert claimed.rollout_id == before.rollout_id

    async def test_a_heartbeat_that_names_attempts_hears_which_are_live(self, store: LightningStore) -> None:
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
        assert await store.get_worker_by_id("worker-1") == await store.get_worker_by_id("worker-1")
        assert (await store.update_worker("worker-1", attempt_ids=None)).attempt_ids is None

    async def test_whoever_runs_an_attempt_hears_that_the_store_has_ended_it(self, store: LightningStore) -> None:
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
