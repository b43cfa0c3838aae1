"""Algorithms from functions, and the metrics that ``tracker`` records."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl


def run(algorithm: Any, strategy: str = "shm") -> dict[int, dict[str, float]]:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(algorithm=algorithm, store=store, strategy=strategy, tracer="dummy", trackers=[])
    assert trainer.fit(lambda task: 1.0).status == "succeeded"
    return {metrics.step: dict(metrics.values) for metrics in asyncio.run(store.query_metrics()).items}


@pytest.mark.parametrize("strategy", ["shm", "cs"])
def test_metrics_of_a_sync_function_are_stored_before_log_returns(strategy: str) -> None:
    @agl.algo
    def algorithm(tracker: Any, store: agl.LightningStore) -> None:
        tracker.log(1, {"reward": 0.5})
        assert len(asyncio.run(store.query_metrics())) == 1
        tracker.log(1, {"loss": 2.0})
        tracker.log(2, {"reward": 1.0})

    assert run(algorithm, strategy) == {1: {"reward": 0.5, "loss": 2.0}, 2: {"reward": 1.0}}


def test_an_async_function_logs_with_and_without_await() -> None:
    @agl.algo
    async def algorithm(tracker: Any, store: agl.LightningStore) -> None:
        await tracker.log(1, {"reward": 0.5})
        assert len(await store.query_metrics()) == 1
        tracker.log(2, {"reward": 0.75})
        tracker.log(3, {"reward": 1.0})

    assert run(algorithm) == {1: {"reward": 0.5}, 2: {"reward": 0.75}, 3: {"reward": 1.0}}


def test_metrics_that_cannot_be_stored_fail_the_run_even_if_they_are_not_awaited() -> None:
    @agl.algo
    async def algorithm(tracker: Any) -> None:
        tracker.log(1, {"reward": "high"})

    with pytest.raises(ValueError, match="reward"):
        run(algorithm)


def test_a_decorated_function_stays_callable_and_a_subclass_of_algorithm_works_as_well() -> None:
    @agl.algo
    def doubled(store: Any = None, factor: int = 2) -> int:
        return 21 * factor

    assert doubled() == 42
    assert not doubled.is_async()

    class Custom(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            rollout = await self.get_store().enqueue_rollout(1)
            await self.get_store().wait_for_rollouts([rollout.rollout_id])
            spans = await self.get_store().query_spans(rollout.rollout_id, "latest")
            await self.get_store().add_metrics(1, {"reward": agl.find_final_reward(spans.items) or 0.0})

    assert run(Custom()) == {1: {"reward": 1.0}}
