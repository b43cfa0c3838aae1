"""The contract of ``LightningStore`` as tests, for authors of stores.

Example::

    class TestMyStore(DurableStoreConformance):     # StoreConformance, if it is not durable
        @pytest.fixture
        async def store(self, tmp_path):
            store = MyStore(tmp_path)               # empty
            yield store
            await store.close()

        @pytest.fixture
        def reopen(self, store, tmp_path):          # for durable stores
            async def reopen():
                await store.close()
                return MyStore(tmp_path)

            return reopen
"""

from __future__ import annotations

import pytest

from agentlightning.records import EnqueueRolloutRequest, RolloutConfig
from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.actions import claim, dequeue, finish, make_span, read, soon
from agentlightning.testing.store.model import Reopen, compare_with_model
from agentlightning.testing.store.queueing import QueueingTests
from agentlightning.testing.store.reading import ReadingTests
from agentlightning.testing.store.waiting import WaitingTests

__all__ = ["DurableStoreConformance", "StoreConformance"]


@pytest.mark.asyncio
class StoreConformance(QueueingTests, WaitingTests, ReadingTests):
    """The tests that every store must pass.

    A subclass provides a fixture ``store``: an empty store that enforces deadlines by itself, with a lease of at least
    ten seconds. The tests need ``pytest-asyncio``, in either of its modes, and ``hypothesis``.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(self, store: LightningStore) -> None:
        await compare_with_model(store)


class DurableStoreConformance(StoreConformance):
    """The tests that a durable store must pass in addition.

    They need a second fixture, ``reopen``: a coroutine function that closes the open store, opens the same database
    again and returns the new store. A test may call it several times; the fixture closes the last store.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(  # type: ignore[override] # pytest passes it
        self, store: LightningStore, reopen: Reopen
    ) -> None:
        await compare_with_model(store, reopen)

    async def test_a_durable_store_reports_that_it_is_durable(self, store: LightningStore) -> None:
        await store.statistics()  # a client learns it from its server
        assert store.capabilities["durable"]

    async def test_everything_is_there_after_reopening(self, store: LightningStore, reopen: Reopen) -> None:
        run = await store.create_run("try", config={"lr": 0.1})
        await store.add_metrics(3, {"reward": 0.5})
        await store.update_resources("tuned", {"prompt": "one"})
        await store.update_resources("tuned", {"prompt": "two"})
        done = await claim(store, "worker-1", RolloutConfig(max_attempts=2, retry_condition=["failed"]))
        await store.add_many_spans([make_span(done, number=number) for number in range(5)])
        await finish(store, done, "failed")
        again = await dequeue(store, "worker-2")
        await store.add_span(make_span(again, "second try"))
        await finish(store, again)
        open_ = await store.enqueue_rollout({"question": "grüße"}, mode="val", metadata={"group": "g"})

        async def everything(store: LightningStore) -> list[object]:
            statistics = await store.statistics()
            return [
                list(await store.query_rollouts()),
                list(await store.query_attempts(done.rollout_id)),
                list(await store.query_spans(done.rollout_id)),
                list(await store.query_resources()),
                await store.get_latest_resources(),
                list(await store.query_workers()),
                list(await store.query_runs()),
                list(await store.query_metrics()),
                {name: count for name, count in statistics.items() if name != "uptime"},
            ]

        before = await everything(store)
        store = await reopen()
        assert await everything(store) == before
        assert await store.get_run_by_id(run.run_id) == run
        assert await read(store, open_.rollout_id) == open_

    async def test_the_queue_keeps_its_order_after_reopening(self, store: LightningStore, reopen: Reopen) -> None:
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
        first = await dequeue(store)
        await finish(store, first, "failed")
        await store.retry_rollout(first.rollout_id)
        store = await reopen()
        await store.enqueue_rollout(3)
        assert [rollout.input for rollout in await store.dequeue_many_rollouts(limit=9)] == [1, 2, 0, 3]

    async def test_a_repetition_is_recognised_after_reopening(self, store: LightningStore, reopen: Reopen) -> None:
        (queued,) = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="a", rollout_id="chosen")])
        claimed = await dequeue(store)
        span = make_span(claimed)
        await store.add_span(span)
        ended = await finish(store, claimed)
        store = await reopen()
        again = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="b", rollout_id="chosen")])
        assert [rollout.input for rollout in again] == ["a"]
        assert await store.add_span(span) is None
        assert await finish(store, claimed) == ended
        assert await store.dequeue_rollout() is None
        assert await store.get_next_span_sequence_id(queued.rollout_id, claimed.attempt.attempt_id) == 2

    async def test_a_deadline_is_enforced_after_reopening(self, store: LightningStore, reopen: Reopen) -> None:
        claimed = await claim(store, config=RolloutConfig(timeout_seconds=0.5))
        store = await reopen()
        (ended,) = await soon(store.wait_for_rollouts([claimed.rollout_id]))
        assert ended.status == "failed"
