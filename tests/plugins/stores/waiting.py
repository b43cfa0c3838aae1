"""Waiting for rollouts in the queue, for ends of rollouts, and for events."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentlightning.event import Event
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.primitives import PATIENCE_S, in_other_thread, soon
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest
from tests.plugins.stores.actions import claim, close, dequeue, finish, make_span, next_event, subscribe

T = TypeVar("T")


async def begin(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a call that has to wait."""
    task = asyncio.create_task(call)
    await _until_asleep(task)
    return task


async def _until_asleep(task: asyncio.Task[object]) -> None:
    """Gives a task time to start waiting; on a busy machine the time may pass in an iteration of the event loop."""
    await asyncio.sleep(0.02)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done(), "it did not wait"


class WaitingTests:
    """Tests of ``dequeue`` with a timeout, ``wait_for_rollouts`` and ``subscribe``."""

    async def test_a_waiting_claim_gets_a_rollout_that_arrives(self, store: LightningStore) -> None:
        waiting = await begin(store.dequeue_rollout("worker-1", timeout=PATIENCE_S))
        queued = await store.enqueue_rollout("late")
        claimed = await soon(waiting)
        assert claimed is not None
        assert claimed.rollout_id == queued.rollout_id

    async def test_a_waiting_claim_gets_a_rollout_enqueued_in_another_thread(self, store: LightningStore) -> None:
        waiting = await begin(store.dequeue_rollout(timeout=PATIENCE_S))
        queued = await in_other_thread(lambda: store.enqueue_rollout("b"))
        claimed = await soon(waiting)
        assert claimed is not None
        assert claimed.rollout_id == queued.rollout_id

    async def test_every_waiting_claim_gets_one_of_many_rollouts(self, store: LightningStore) -> None:
        waiting = [asyncio.create_task(store.dequeue_rollout(timeout=PATIENCE_S)) for _ in range(20)]
        await _until_asleep(waiting[-1])
        queued = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(20)])
        claimed = await soon(asyncio.gather(*waiting))
        assert sorted(item.rollout_id for item in claimed if item) == sorted(item.rollout_id for item in queued)

    async def test_a_cancelled_claim_loses_no_rollout(self, store: LightningStore) -> None:
        got: list[AttemptedRollout] = []

        async def worker() -> None:
            claimed = await dequeue(store, timeout=PATIENCE_S)
            got.append(claimed)

        queued: list[str] = []
        for pause in (0, 1, 2, 3, 5, 8):  # iterations of the event loop between enqueueing and cancelling
            waiting = [asyncio.create_task(worker()) for _ in range(8)]
            await asyncio.sleep(0.03)
            queued += [(await store.enqueue_rollout(n)).rollout_id for n in range(4)]
            for _ in range(pause):
                await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        while len(got) < len(queued):  # released rollouts are in the queue, or return to it soon
            claimed = await soon(store.dequeue_rollout(timeout=PATIENCE_S))
            assert claimed is not None, f"{len(queued) - len(got)} of {len(queued)} rollouts were lost"
            got.append(claimed)
        assert sorted(rollout.rollout_id for rollout in got) == sorted(queued)
        assert await store.dequeue_rollout() is None

    async def test_waiting_returns_when_the_last_rollout_ends(self, store: LightningStore) -> None:
        one, two = await claim(store), await claim(store)
        ids = [two.rollout_id, one.rollout_id]
        waiting = await begin(store.wait_for_rollouts(ids))
        await finish(store, one)
        await _until_asleep(waiting)
        await finish(store, two, "failed")
        ended = await soon(waiting)
        assert [(rollout.rollout_id, rollout.status) for rollout in ended] == [
            (two.rollout_id, "failed"),
            (one.rollout_id, "succeeded"),
        ]
        assert [rollout.rollout_id for rollout in await soon(store.wait_for_rollouts(ids))] == ids

    async def test_a_rollout_that_ends_while_a_wait_begins_is_not_missed(self, store: LightningStore) -> None:
        for pause in range(24):  # iterations of the event loop between the start of the end and of the wait
            claimed = await claim(store)
            ending = asyncio.create_task(finish(store, claimed))
            for _ in range(pause):
                await asyncio.sleep(0)
            (ended,) = await soon(store.wait_for_rollouts([claimed.rollout_id]))
            assert ended.status == "succeeded"
            await ending

    async def test_another_thread_can_wait_too(self, store: LightningStore) -> None:
        claimed = await claim(store)
        waiting = await begin(in_other_thread(lambda: store.wait_for_rollouts([claimed.rollout_id])))
        await finish(store, claimed)
        assert [rollout.rollout_id for rollout in await soon(waiting)] == [claimed.rollout_id]

    async def test_a_subscriber_sees_the_life_of_a_rollout_in_order(self, store: LightningStore) -> None:
        events = await subscribe(store, None)
        await store.with_run("other").enqueue_rollout("of another run")
        claimed = await claim(store)
        await store.add_span(make_span(claimed))
        await finish(store, claimed)
        seen: list[Event] = []
        while not seen or seen[-1].kind != "rollout_finished":
            event = await next_event(events)
            if event.kind != "step_finished":
                seen.append(event)
        assert [event.kind for event in seen] == [
            "rollout_enqueued",
            "rollout_started",
            "attempt_finished",
            "rollout_finished",
        ]
        assert {event.run_id for event in seen} == {store.run_id}
        assert {getattr(event, "rollout_id", None) for event in seen} == {claimed.rollout_id}
        await close(events)
