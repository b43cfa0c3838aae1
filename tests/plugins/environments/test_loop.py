"""The loop that plays episodes: rewards, prompts, turns, errors, configuration, and training."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.testing.agent import Answer, Lab
from agentlightning.testing.environment import EnvironmentEpisode
from agentlightning_plugins.environments.loop import make_environment
from agentlightning_plugins.shared.configuration.assembly import load_parts
from agentlightning_plugins.shared.configuration.config import read_config
from agentlightning_plugins.shared.configuration.document import read_document
from tests.plugins.environments.games import Guess, Stones
from tests.plugins.environments.test_harbor import write_task
from tests.plugins.environments.test_mcp import STDIO
from tests.plugins.environments.training import train_two_steps


async def _run(environment: Any, script: Any, task: Any, **more: Any) -> tuple[Any, list[agl.Span]]:
    async with Lab(agl.wrap(environment, **more), script, reward=more.get("reward")) as lab:
        (rollout,) = await lab.run(task)
        return rollout, await lab.spans(rollout)


def _take(*counts: int) -> list[Answer]:
    return [Answer(tool_calls=[("take", {"count": count})]) for count in counts]


async def test_each_call_gets_the_reward_of_its_step_and_the_attempt_their_sum() -> None:
    rollout, spans = await _run(Stones(), _take(1, 2, 3), {"seed": 1})
    assert rollout.attempt.reward == pytest.approx(0.6)
    assert [triplet.reward for triplet in TraceToTriplet().adapt(spans)] == [0.1, 0.2, 0.3]
    discounted = TraceToTriplet(credit={"name": "discounted", "gamma": 1.0}).adapt(spans)
    assert [triplet.reward for triplet in discounted] == pytest.approx([0.6, 0.5, 0.3])
    assert {triplet.metadata["agent_name"] for triplet in discounted} == {"Stones"}


async def test_an_episode_in_which_the_model_never_acts_has_the_reward_zero() -> None:
    for environment in (Stones(), Guess()):
        rollout, spans = await _run(environment, [Answer("I would rather talk.")], {"seed": 1})
        assert rollout.attempt.reward == 0.0
        assert TraceToTriplet().adapt(spans)[-1].reward == 0.0


async def test_a_reward_function_gets_the_last_answer_and_decides() -> None:
    def reward(task: Any, output: str, rollout: agl.Rollout) -> float:
        assert output == "Enough."
        return 7.0

    rollout, _ = await _run(Stones(), [*_take(1), Answer("Enough.")], {"seed": 1}, reward=reward)
    assert rollout.attempt.reward == 7.0


async def test_the_budget_of_turns_ends_an_episode() -> None:
    rollout, spans = await _run(Stones(), _take(0), {"seed": 1})
    assert rollout.status == "succeeded"
    assert len(TraceToTriplet().adapt(spans)) == Stones.max_turns


async def test_the_instructions_are_a_prompt_that_is_tuned() -> None:
    agent = agl.wrap(Stones(), prompts=["instructions"])
    assert agent.initial_prompts()["instructions"].template == Stones.instructions
    async with Lab(agent, _take(3), reward=None) as lab:
        await lab.run({"seed": 4}, resources={"instructions": "Take 3 of {seed} stones."})
        assert lab.server.requests[0].body["messages"][0] == {"role": "system", "content": "Take 3 of 4 stones."}


class _Broken(agl.Environment):
    """Breaks the rules of its base class in the way that the task names."""

    def reset(self, task: str, seed: int) -> Any:
        return 5 if task == "reset" else task

    def step(self, action: str) -> Any:
        return {"step": 3, "reward": ("x", "much", False), "stop": next(iter(()))}[action] if action else ""


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("reset", r"_Broken.reset returned '5' \(int\); return a text or a list of message parts"),
        ("stop", r"_Broken raised StopIteration\(\)"),
    ],
)
async def test_an_environment_that_breaks_a_rule_fails_its_attempt(task: str, message: str) -> None:
    rollout, _ = await _run(_Broken(), [Answer(task)], task)
    assert rollout.status == "failed"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(rollout.attempt.error.message)


class _Database(agl.Environment):
    """Holds what only the thread that has opened it can use."""

    def reset(self, task: str, seed: int) -> str:
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("create table stones (count)")
        return "go"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.connection.execute("insert into stones values (1)")
        (count,) = self.connection.execute("select count(*) from stones").fetchone()
        return f"{count}", 1.0, count == 3

    def close(self) -> None:
        self.connection.close()
        self.is_closed = True


async def test_the_synchronous_methods_of_an_episode_run_in_one_thread() -> None:
    async with EnvironmentEpisode(_Database()) as episode:
        await episode.reset("")
        assert [await episode.step("") for _ in range(3)] == ["1", "2", "3"]
    assert vars(episode.environment)["is_closed"]


def test_wrong_settings_are_refused_with_what_is_allowed() -> None:
    for spec, message in (
        ("gymnasum:FrozenLake-v1", r"Did you mean 'gymnasium'\? Kinds of environments: gymnasium, harbor, mcp"),
        ("FrozenLake-v1", "write module:attribute or path/to/file.py:attribute"),
        ({"max_turns": 3}, "name a kind with its address; the kinds: gymnasium, "),
        ({"gymnasium": "FrozenLake-v1", "option": {}}, r"no setting 'option'\. Did you mean 'options'\?"),
        ("gymnasium:FrozenLak-v1", "gymnasium:FrozenLak-v1 cannot be made: .*FrozenLake"),
        ("gymnasium:CartPole-v1", "CartPole-v1 has observations in Box.*, which are no text"),
        ("textarena:GuessTheNumbr-v0", "has no game 'GuessTheNumbr-v0'. Did you mean 'GuessTheNumber-v0"),
        ({"textarena": "Nim-v0", "players": 2}, "a game of several players needs an opponent"),
        ("openenv:127.0.0.1:8000", "give the URL of the server"),
        (
            {"verifiers": "x", "python": "/no/python"},
            r"python = '/no/python' is not a program; make a virtual environment",
        ),
        ("tests.plugins.environments.games:random", "is a module, not an agl.Environment"),
    ):
        with pytest.raises(agl.ConfigError, match=message):
            make_environment(spec)
    with pytest.raises(agl.ConfigError, match="verifiers:x: max_turns is of no use"):
        agl.wrap(make_environment({"verifiers": "x", "python": sys.executable, "max_turns": 3}))
    for name, value in {"max_turns": 0, "timeout_s": -1.0, "action": "("}.items():
        environment = Stones()
        setattr(environment, name, value)
        with pytest.raises(agl.ConfigError, match=name):
            agl.wrap(environment)


def test_a_configuration_names_an_environment_in_place_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "game.yaml"
    file.write_text("environment: {textarena: GuessTheNumber-v0, max_turns: 7, seeds: 9}\nalgorithm: baseline\n")
    document = read_document(file)
    parts = load_parts(read_config(document), document)
    assert parts.train == [{"seed": seed} for seed in range(9)]
    assert parts.val is None
    file.write_text("environment: gymnasum:X\nalgorithm: baseline\n")
    document = read_document(file)
    with pytest.raises(agl.ConfigError, match=r"game.yaml.*line 1.*environment.*Did you mean 'gymnasium'"):
        load_parts(read_config(document), document)
    file.write_text("environment: gymnasium:X\nagent: a.py:b\n")
    with pytest.raises(agl.ConfigError, match="agent and environment are given"):
        read_config(read_document(file))


def says_something(task: Any, output: str, rollout: agl.Rollout) -> float:
    return float(bool(output))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gymnasium", "textarena", "mcp", "harbor"])
def test_grpo_trains_in_an_environment(tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        write_task(tmp_path / "tasks", name)
    address: Any = {
        "gymnasium": "FrozenLake-v1", "textarena": "GuessTheNumber-v0", "mcp": STDIO, "harbor": str(tmp_path / "tasks"),
    }[kind]  # fmt: skip
    environment = make_environment({kind: address, "max_turns": 2})
    if kind == "mcp":
        train_two_steps(environment, tmp_path, ["Take 2 of 9 stones.", "Take one."], reward=says_something)
    else:
        train_two_steps(environment, tmp_path)
