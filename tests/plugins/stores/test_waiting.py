"""Wake-ups: signals, countdowns, subscriptions and the waits of a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from agentlightning.errors import StoreError
from agentlightning.event import Event, RolloutEnqueued, RolloutFinished, StepFinished
from agentlightning.frozen import FrozenDict
from agentlightning.store import waiting
from agentlightning.store.backend import Claim
from agentlightning.store.engine import BackendStore
from agentlightning.store.waiting import Countdown, Signal, Waiters
from agentlightning.types import AttemptedRollout, Rollout
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore, MemoryBackend
from tests.waiting import LIMIT_S


async def test_waiting_for_a_signal_that_is_already_set_returns_immediately() -> None:
    signal = Signal()
    signal.set()
    assert await signal.wait()


async def test_waiting_for_a_signal_ends_at_the_deadline() -> None:
    signal = Signal()
    start = time.monotonic()
    assert not await asyncio.wait_for(signal.wait(start + 0.05), LIMIT_S)
    waited_s = time.monotonic() - start
    assert waited_s > 0.04


async def test_setting_a_signal_of_a_closed_loop_is_harmless() -> None:
    async def make() -> Signal:
        return Signal()

    signal = await asyncio.to_thread(lambda: asyncio.run(make()))
    signal.set()
    assert signal.is_set


async def test_each_rollout_wakes_the_claim_that_has_waited_longest() -> None:
    waiters = Waiters()
    first, second, elsewhere = waiters.join_queue("a"), waiters.join_queue("a"), waiters.join_queue("b")
    waiters.publish([RolloutEnqueued(run_id="a", rollout_id="ro-1")])
    assert (first.is_set, second.is_set, elsewhere.is_set) == (True, False, False)
    waiters.publish([RolloutEnqueued(run_id="a", rollout_id="ro-2")])
    assert (second.is_set, elsewhere.is_set) == (True, False)


async def test_an_unused_signal_is_passed_to_the_next_claim_in_the_queue() -> None:
    waiters = Waiters()
    gone, next_ = waiters.join_queue("a"), waiters.join_queue("a")
    waiters.publish([RolloutEnqueued(run_id="a", rollout_id="ro-1")])
    waiters.leave_queue("a", gone)
    assert next_.is_set


async def test_a_claim_that_tries_again_keeps_its_place_in_the_queue() -> None:
    waiters = Waiters()
    first, second = waiters.join_queue("a"), waiters.join_queue("a")
    waiters.publish([RolloutEnqueued(run_id="a", rollout_id="ro-1")])
    waiters.rejoin_queue("a", first)  # another claim was faster
    waiters.publish([RolloutEnqueued(run_id="a", rollout_id="ro-2")])
    assert (first.is_set, second.is_set) == (True, False)


async def test_a_countdown_ends_with_its_last_rollout_and_is_removed() -> None:
    waiters = Waiters()
    countdown = Countdown(["ro-1", "ro-2", "ro-3"])
    waiters.add(countdown)
    waiters.discard(countdown, ["ro-2"])
    waiters.publish([RolloutFinished(rollout_id="ro-1", status="failed")])
    assert not await countdown.wait(0)
    waiters.publish([RolloutFinished(rollout_id="ro-3", status="succeeded")])
    assert await countdown.wait(0)
    assert not waiters._countdowns


async def test_a_subscriber_that_is_too_slow_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_UNREAD_EVENTS", 2)
    waiters = Waiters()
    events = waiters.events("default", None)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)  # lets the task subscribe
    waiters.publish([StepFinished(step=step, values=FrozenDict()) for step in range(3)])
    assert [event.step for event in (await first, await anext(events)) if isinstance(event, StepFinished)] == [0, 1]
    with pytest.raises(StoreError, match="read them faster"):
        await anext(events)


async def test_closing_a_store_ends_all_waits() -> None:
    store = InMemoryLightningStore()
    queued = await store.start_rollout("a")
    waits = [
        asyncio.create_task(store.dequeue_rollout(timeout=LIMIT_S)),
        asyncio.create_task(store.wait_for_rollouts([queued.rollout_id])),
    ]
    events = [event async for event in _until_closed(store)]
    assert await asyncio.gather(*waits) == [None, []]
    assert events == []


async def _until_closed(store: InMemoryLightningStore) -> AsyncIterator[Event]:
    asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(store.close()))
    async for event in store.subscribe():
        yield event


class FailsOnce(MemoryBackend):
    """Fails the first claim that would get a rollout."""

    failures = 1

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        if self._queues and self.failures:
            self.failures -= 1
            raise ConnectionError("the database is unreachable")
        return await super().claim(run_id, limit, decide)


async def test_a_claim_that_fails_leaves_the_rollout_to_the_next_claim() -> None:
    store = BackendStore(FailsOnce())
    claims = [asyncio.create_task(store.dequeue_rollout(timeout=LIMIT_S)) for _ in range(2)]
    await asyncio.sleep(0.05)
    await store.enqueue_rollout("a")
    unlucky, lucky = await asyncio.wait_for(asyncio.gather(*claims, return_exceptions=True), LIMIT_S)
    assert isinstance(unlucky, ConnectionError)
    assert isinstance(lucky, AttemptedRollout)
    await store.close()


async def test_a_waiting_claim_is_woken_within_a_few_turns_of_the_event_loop() -> None:
    store = InMemoryLightningStore()
    waiting_ = asyncio.create_task(store.dequeue_rollout(timeout=LIMIT_S))
    await asyncio.sleep(0.01)
    await store.enqueue_rollout("a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert waiting_.done()
    await store.close()
