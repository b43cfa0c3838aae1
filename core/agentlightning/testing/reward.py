"""Conformance tests for reward functions.

Use them like this::

    class TestMyReward(RewardConformance):
        examples = [("2 + 3", "It is 5.", 1.0), ("2 + 3", "It is 6.", 0.0)]

        @pytest.fixture
        def reward(self):
            return MyReward()
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import cloudpickle
import pytest

from agentlightning.litagent import wrap
from agentlightning.records import AttemptedRollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store.factory import create_store
from agentlightning.testing import promised
from agentlightning.tracer import DummyTracer

__all__ = ["RewardConformance"]


async def rate(reward: Any, examples: Sequence[tuple[Any, ...]]) -> list[AttemptedRollout]:
    """Returns a finished rollout for each example (task, output, ...), whose outputs ``reward`` has rated at once."""
    outputs = [output for _, output, *_ in examples]
    async with contextlib.AsyncExitStack() as stack:
        store = create_store("memory://")
        stack.push_async_callback(store.close)
        runners = [LitAgentRunner[Any](DummyTracer()) for _ in examples]
        for runner, output in zip(runners, outputs, strict=True):
            stack.enter_context(runner.run_context(agent=wrap(lambda task, said=output: said, reward), store=store))
        steps = (runner.step(task) for runner, (task, *_) in zip(runners, examples, strict=True))
        rollouts = await asyncio.gather(*steps)
        return [rollout for rollout in rollouts if isinstance(rollout, AttemptedRollout)]


@pytest.mark.asyncio
class RewardConformance:
    """Tests that every reward function must pass.

    Subclass it, set ``examples`` and define one fixture, ``reward``: the function, or an object that is called like it.
    """

    examples: ClassVar[Sequence[tuple[Any, Any, float]]] = []
    """Tasks and outputs with their rewards; at least two rewards differ."""
    odd_outputs: ClassVar[Sequence[Any]] = ["", "no", "NaN", "1e999", "½ \x00 {x} <b> ```", "long " * 20_000]
    """Outputs that an agent may have while it is trained."""

    async def test_each_answer_gets_its_reward_and_better_ones_get_more(self, reward: Any) -> None:
        expected = [each for _, _, each in self.examples]
        assert len(set(expected)) > 1, "set `examples`, with at least two different rewards"
        self._check(await rate(reward, self.examples), expected, "reward(task, output, rollout) returns the reward")

    async def test_rollouts_rated_at_once_do_not_mix(self, reward: Any) -> None:
        many = [*self.examples, *reversed(self.examples)] * 4
        promise = "an object that rates serves several rollouts at once, and keeps nothing of one for another"
        self._check(await rate(reward, many), [each for _, _, each in many], promise)

    async def test_any_output_gets_a_finite_reward(self, reward: Any) -> None:
        task = self.examples[0][0]
        for output, rollout in zip(
            self.odd_outputs, await rate(reward, [(task, x) for x in self.odd_outputs]), strict=True
        ):
            error = rollout.attempt.error
            assert rollout.attempt.reward is not None, (
                f"reward(task, output, rollout) returns a finite number for any output, such as {output[:20]!r}; "
                f"{'it returned None' if error is None else f'{error.type}: {error.message}'}"
            )

    async def test_it_can_be_sent_to_a_runner_process(self, reward: Any) -> None:
        with promised(
            "a reward function can be pickled: the runners' processes get it; make clients when it is called"
        ):
            there = cloudpickle.loads(cloudpickle.dumps(reward))
        expected = [each for _, _, each in self.examples]
        self._check(await rate(there, self.examples), expected, "a copy in another process rates in the same way")

    def _check(self, rollouts: Sequence[AttemptedRollout], expected: Sequence[float], promise: str) -> None:
        for rollout, reward in zip(rollouts, expected, strict=True):
            error = rollout.attempt.error
            found = rollout.attempt.reward if error is None else f"{error.type}: {error.message}"
            assert found == pytest.approx(reward), f"{promise}: {reward} for {rollout.input!r}; it was {found}"
