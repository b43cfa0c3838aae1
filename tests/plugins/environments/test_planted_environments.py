"""Environments with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any, ClassVar

import pytest

from agentlightning.testing.environment import EnvironmentConformance
from tests.planted import assert_each_test_finds_one, assert_found
from tests.plugins.environments.games import Guess


class Kit(EnvironmentConformance):
    def act(self, observations: list[str]) -> str:
        return f"[{len(observations) - 1}]"


class DrawsFromTheProcess(Guess):
    async def reset(self, task: Any, seed: int) -> str:
        return f"{await super().reset(task, seed)} {random.random()}"


class IsAlwaysTheSame(Guess):
    async def reset(self, task: Any, seed: int) -> str:
        return await super().reset(task, 1)


class KeepsItsHistory(Guess):
    def __init__(self) -> None:
        self.said: list[str] = []

    async def step(self, action: str) -> tuple[str, float, bool]:
        self.said.append(action)
        text, reward, is_over = await super().step(action)
        return f"{text} after {len(self.said)}", reward, is_over


class NeverEnds(Guess):
    async def step(self, action: str) -> tuple[str, float, bool]:
        return (*(await super().step(str(int(action) % 10)))[:2], False)

    action = r"\[(\d+)\]"


class SharesItsNumber(Guess):
    current: ClassVar[list[int]] = []

    async def reset(self, task: Any, seed: int) -> str:
        text = await super().reset(task, seed)
        SharesItsNumber.current = [self.number]
        return text

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(0)
        [self.number] = SharesItsNumber.current
        return await super().step(action)


class LosesItsSettings(Guess):
    def __init__(self) -> None:
        self.greeting = "Hello. "

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __deepcopy__(self, memo: object) -> LosesItsSettings:
        copied = LosesItsSettings()
        vars(copied).clear()
        vars(copied).update(vars(self))
        return copied

    async def reset(self, task: Any, seed: int) -> str:
        return getattr(self, "greeting", "") + await super().reset(task, seed)


class HoldsALock(Guess):
    lock: ClassVar[Any] = threading.Lock()
    timeout_s = 1.0

    def reset(self, task: Any, seed: int) -> Any:
        self.lock.acquire()
        self.holds = True
        return super().reset(task, seed)

    def close(self) -> None:
        self.lock.release()


PLANTED: list[tuple[type[Guess], str, str, dict[str, Any]]] = [
    (DrawsFromTheProcess, "test_a_seed_repeats_its_episode_and_seeds_differ", "lead to the same observations", {}),
    (IsAlwaysTheSame, "test_a_seed_repeats_its_episode_and_seeds_differ", "whose episodes are not all alike", {}),
    (KeepsItsHistory, "test_reset_is_independent_of_the_last_episode", "not on the episode before", {}),
    (NeverEnds, "test_a_step_after_the_end_is_refused", "the actions end the episode", {}),
    (SharesItsNumber, "test_many_episodes_at_once_never_mix", "sees nothing of the others", {}),
    (LosesItsSettings, "test_it_is_an_agent_whose_calls_and_rewards_are_recorded", "Hello. Which digit?", {}),
    (HoldsALock, "test_a_broken_episode_fails_its_own_attempt_in_time", "failed", {"fault": "hang"}),
]


@pytest.mark.parametrize(
    ("environment", "test", "message", "given"), PLANTED, ids=[case[0].__name__ for case in PLANTED]
)
def test_the_kit_finds_a_planted_mistake(
    environment: type[Guess], test: str, message: str, given: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    assert_found(Kit, test, request, message, environment=environment(), **given)


def test_each_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(Kit, [test for _, test, _, _ in PLANTED])
