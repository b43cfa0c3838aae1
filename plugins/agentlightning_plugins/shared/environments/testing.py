"""``EnvironmentConformance``: the tests that every environment must pass."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import cloudpickle
import pytest

from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.environment import Environment
from agentlightning.errors import RolloutError
from agentlightning.litagent import wrap
from agentlightning_plugins.shared.agent_testing.lab import Lab
from agentlightning_plugins.shared.environments.episode import EnvironmentEpisode
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest

_MAX_ACTIONS = 20


@pytest.mark.asyncio
class EnvironmentConformance:
    """Tests that every environment must pass.

    Subclass it, set ``actions`` or override ``act``, and define one fixture, ``environment``.
    """

    tasks: ClassVar[Sequence[Mapping[str, Any]]] = tuple({"seed": seed} for seed in range(8))
    """At least two tasks; their episodes are not all alike."""
    actions: ClassVar[Sequence[str | tuple[str, Mapping[str, Any]]]] = ()
    """The model's turns: an answer, or the name of a tool and its arguments. The last one is repeated,
    unless it is an answer to an environment that takes calls of tools only, which ends the episode."""
    ends: ClassVar[bool] = True
    """Whether the actions lead to the end of an episode (``done``)."""
    at_once: ClassVar[int] = 64
    """Number of episodes that run at once."""

    def act(self, observations: Sequence[str]) -> str | tuple[str, Mapping[str, Any]]:
        """Returns the next action after these observations of an episode."""
        return self.actions[min(len(observations), len(self.actions)) - 1]

    async def play(self, environment: Environment, task: Mapping[str, Any]) -> tuple[list[str], list[float]]:
        """Plays an episode without a model; returns its observations and the rewards of its steps."""
        async with EnvironmentEpisode(environment) as episode:
            return await self._play(episode, task), episode.rewards

    async def _play(self, episode: EnvironmentEpisode, task: Mapping[str, Any]) -> list[str]:
        observations = [_text(await episode.reset(task))]
        has_tools = bool(await episode.read_tools())
        while not episode.done and len(observations) <= _MAX_ACTIONS:
            action = self.act(observations)
            if isinstance(action, str) and has_tools and not episode.takes_answers:
                break
            observations.append(_text(await _run(episode, action)))
        return observations

    def lab(self, agent: Any) -> Lab:
        """Makes a runner, a store and a model that acts as ``act`` says."""

        def script(request: RecordedRequest) -> Answer:
            seen = [_text(each["content"]) for each in request.body["messages"] if each["role"] in ("user", "tool")]
            action = self.act(seen)
            return Answer(action) if isinstance(action, str) else Answer(tool_calls=[(action[0], dict(action[1]))])

        return Lab(agent, script, reward=None)

    async def test_a_seed_repeats_its_episode_and_seeds_differ(self, environment: Environment) -> None:
        played = [await self.play(environment, task) for task in self.tasks]
        assert [await self.play(environment, task) for task in self.tasks] == played, (
            "reset(task, seed) and the same actions always lead to the same observations and rewards"
        )
        assert any(each != played[0] for each in played), "set `tasks` whose episodes are not all alike"

    async def test_reset_is_independent_of_the_last_episode(self, environment: Environment) -> None:
        first, *others = [await self.play(environment, task) for task in self.tasks[:3]]
        async with EnvironmentEpisode(environment) as episode:
            for task, expected in zip([*self.tasks[1:3], self.tasks[0]], [*others, first], strict=True):
                assert (await self._play(episode, task), episode.rewards) == expected, (
                    "an episode depends on its task and its actions, and not on the episode before"
                )

    async def test_a_step_after_the_end_is_refused(self, environment: Environment) -> None:
        async with EnvironmentEpisode(environment) as episode:
            observations = await self._play(episode, self.tasks[0])
            assert episode.done is self.ends, "the actions end the episode, unless `ends` is False"
            if self.ends:
                with pytest.raises(RolloutError, match="after the episode was over"):
                    await _run(episode, self.act(observations[:-1]))

    async def test_many_episodes_at_once_never_mix(self, environment: Environment) -> None:
        expected = [await self.play(environment, task) for task in self.tasks]
        tasks = [self.tasks[number % len(self.tasks)] for number in range(self.at_once)]
        played = await asyncio.gather(*(self.play(environment, task) for task in tasks))
        for number, each in enumerate(played):
            assert each == expected[number % len(expected)], "an episode sees nothing of the others"

    async def test_it_is_an_agent_whose_calls_and_rewards_are_recorded(self, environment: Environment) -> None:
        observations, rewards = await self.play(environment, self.tasks[0])
        async with self.lab(environment) as lab:
            lab.agent = cloudpickle.loads(cloudpickle.dumps(lab.agent))  # as a runner process gets it
            (rollout,) = await lab.run(dict(self.tasks[0]))
            triplets = TraceToTriplet().adapt(await lab.spans(rollout))
        error = rollout.attempt.error
        assert error is None, error
        if type(environment).reward is Environment.reward:
            assert (rollout.attempt.reward or 0.0) == pytest.approx(sum(rewards))
        seen = triplets[-1].prompt["raw_content"]
        shown = [_text(each.get("content")) for each in seen if each["role"] in ("user", "tool")]
        assert shown == observations[: len(shown)]
        assert len(shown) == len(triplets) >= len(observations) - 1

    @pytest.mark.parametrize("fault", ["crash", "hang"])
    async def test_a_broken_episode_fails_its_own_attempt_in_time(self, environment: Environment, fault: str) -> None:
        broken = break_environment(environment, fault)
        async with self.lab(wrap(broken)) as lab:
            good, bad, other = await lab.run(
                dict(self.tasks[0]), {**self.tasks[1], "is_broken": True}, dict(self.tasks[0])
            )
        assert (good.status, other.status) == ("succeeded", "succeeded"), (good.attempt.error, other.attempt.error)
        assert good.attempt.reward == other.attempt.reward
        assert bad.status == "failed"
        assert bad.attempt.error is not None
        assert ("took longer than" if fault == "hang" else "it crashed") in bad.attempt.error.message


def break_environment(environment: Environment, fault: str) -> Environment:
    """Returns a copy whose actions crash or hang in episodes of tasks with ``is_broken``."""
    cls = type(environment)

    def reset(self: Any, task: Any, seed: int) -> Any:
        self.is_broken = task.get("is_broken", False)
        self.timeout_s = 2.0 if self.is_broken and fault == "hang" else self.timeout_s
        return cls.reset(self, {key: value for key, value in task.items() if key != "is_broken"}, seed)

    def run(name: str) -> Any:
        def method(self: Any, *arguments: Any) -> Any:
            if self.is_broken and fault == "crash":
                raise RuntimeError("it crashed")
            while self.is_broken:
                time.sleep(0.01)
            return getattr(cls, name)(self, *arguments)

        return method

    broken = copy.copy(environment)
    overridden = [name for name in ("step", "call", "tools") if getattr(cls, name) is not getattr(Environment, name)]
    broken.__class__ = type(cls.__name__, (cls,), {"reset": reset, **{name: run(name) for name in overridden}})
    return broken


async def _run(episode: EnvironmentEpisode, action: str | tuple[str, Mapping[str, Any]]) -> Any:
    return await (episode.step(action) if isinstance(action, str) else episode.call(action[0], json.dumps(action[1])))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)
