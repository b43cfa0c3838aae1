"""Environments of users, and the kinds that need no server."""

from __future__ import annotations

from typing import ClassVar

import pytest

from agentlightning.environment import Environment
from agentlightning.testing.environment import EnvironmentConformance, EnvironmentEpisode
from agentlightning_plugins.environments.gymnasium import GymnasiumEnvironment
from agentlightning_plugins.environments.textarena import TextArenaEnvironment
from tests.plugins.environments.games import Guess, Stones


class TestTools(EnvironmentConformance):
    actions: ClassVar = [("take", {"count": "x"}), ("take", {"count": 2}), ("take", {"count": 3})]

    @pytest.fixture
    def environment(self) -> Environment:
        return Stones()


class TestActions(EnvironmentConformance):
    @pytest.fixture
    def environment(self) -> Environment:
        return Guess()

    def act(self, observations: list[str]) -> str:
        return f"I say [{len(observations) - 1}]"


class TestGymnasium(EnvironmentConformance):
    actions: ClassVar = ["1", "no idea", "2", "action 1", "2"]

    @pytest.fixture
    def environment(self) -> Environment:
        return GymnasiumEnvironment("FrozenLake-v1", {"map_name": "4x4"})


class TestTextArena(EnvironmentConformance):
    @pytest.fixture
    def environment(self) -> Environment:
        return TextArenaEnvironment("GuessTheNumber-v0")

    def act(self, observations: list[str]) -> str:
        return f"[{2 * len(observations)}]"


async def test_an_opponent_plays_for_the_other_players_of_textarena() -> None:
    seen: list[str] = []

    def take_from_the_first_pile(observation: str) -> str:
        seen.append(observation)
        return "[0 1]"

    environment = TextArenaEnvironment("Nim-v0", players=2, opponent=take_from_the_first_pile)
    async with EnvironmentEpisode(environment) as episode:
        assert "pile 0: 3" in str(await episode.reset({"seed": 1}))
        observation = str(await episode.step("[2 5]"))
        assert "pile 0: 2" in observation
        assert "pile 2: 0" in observation
        await episode.step("[1 4]")
        await episode.step("[0 1]")
    assert len(seen) == 2
    assert (episode.done, episode.rewards) == (True, [1.0])
