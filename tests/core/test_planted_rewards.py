"""Reward functions with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any, ClassVar

import pytest

from agentlightning.testing.reward import RewardConformance
from tests.planted import assert_each_test_finds_one, assert_found


class Sum:
    """A correct reward: 1 if the answer has the sum of the task's numbers."""

    async def __call__(self, task: dict[str, Any], output: str, rollout: Any) -> float:
        return float(sum(task["numbers"]) == self.read(output))

    def read(self, output: str) -> float | None:
        found = re.search(r"\d+", output)
        return float(found[0]) if found else None


class TestSum(RewardConformance):
    examples: ClassVar = [({"numbers": [2, 3]}, "It is 5.", 1.0), ({"numbers": [2, 4]}, "It is 5.", 0.0)]

    @pytest.fixture
    def reward(self) -> Sum:
        return Sum()


class AlwaysRight(Sum):
    async def __call__(self, task: Any, output: str, rollout: Any) -> float:
        return 1.0


class KeepsTheTask(Sum):
    async def __call__(self, task: Any, output: str, rollout: Any) -> float:
        self.task = task
        await asyncio.sleep(0.01)
        return await super().__call__(self.task, output, rollout)


class NeedsANumber(Sum):
    def read(self, output: str) -> float:
        return float(re.findall(r"\d+", output)[0])


class ReturnsNaN(Sum):
    async def __call__(self, task: Any, output: str, rollout: Any) -> float:
        return await super().__call__(task, output, rollout) if "It is" in output else float("nan")


class HoldsALock(Sum):
    def __init__(self) -> None:
        self.lock = threading.Lock()


PLANTED = [
    (
        AlwaysRight,
        "test_each_answer_gets_its_reward_and_better_ones_get_more",
        "0.0 for {'numbers': [2, 4]}; it was 1.0",
    ),
    (KeepsTheTask, "test_rollouts_rated_at_once_do_not_mix", "serves several rollouts at once"),
    (NeedsANumber, "test_any_output_gets_a_finite_reward", "IndexError"),
    (ReturnsNaN, "test_any_output_gets_a_finite_reward", "returns a finite number for any output"),
    (HoldsALock, "test_it_can_be_sent_to_a_runner_process", "can be pickled"),
]


@pytest.mark.parametrize(("reward", "test", "message"), PLANTED, ids=[planted[0].__name__ for planted in PLANTED])
def test_the_kit_finds_a_planted_mistake(
    reward: type[Sum], test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(TestSum, test, request, message, reward=reward())


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(RewardConformance, [test for _, test, _ in PLANTED])
