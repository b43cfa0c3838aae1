"""Environments of verifiers, which run in the environment ``verifiers``; verifiers_guess.py is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.reward import find_reward_spans, get_rewards_from_span
from agentlightning.testing.agent import Answer, Lab
from agentlightning_plugins.environments.loop import make_environment
from agentlightning_plugins.shared.scripted_model.server import RecordedRequest
from tests.plugins.environments.servers import FOLDER
from tests.plugins.environments.training import train_two_steps
from tests.source import REPO

pytestmark = pytest.mark.slow
PYTHON = str(REPO / ".venvs" / "verifiers" / "bin" / "python")
GUESS = {"verifiers": "verifiers-guess", "python": PYTHON, "seeds": 2}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    command = [sys.executable, REPO / ".ci" / "environments.py", "verifiers"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def _environment_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


async def test_an_attempt_is_one_rollout_of_verifiers_and_a_crash_fails_its_own_attempt() -> None:
    async with Lab(agl.wrap(make_environment(GUESS)), [Answer("2")], reward=None) as lab:
        good, bad = await lab.run({"index": 2}, {"index": 3})
        assert good.attempt.reward == 2.5
        [span] = find_reward_spans(await lab.spans(good))
        rewards = {each.name: each.value for each in get_rewards_from_span(span)}
        assert rewards == {"reward": 2.5, "is_right": 1.0, "is_short": 1.0}
        (request,) = lab.server.requests
        assert request.body["messages"] == [{"role": "user", "content": "Say 2."}]
    assert bad.status == "failed"
    assert "it crashed" in bad.attempt.error.message


@pytest.mark.soak  # each attempt imports verifiers
async def test_64_attempts_at_once_never_mix() -> None:
    def script(request: RecordedRequest) -> Answer:
        return Answer(str(request.body["messages"][0]["content"]).removeprefix("Say ").removesuffix("."))

    async with Lab(agl.wrap(make_environment({**GUESS, "seeds": 68})), script, reward=None) as lab:
        rollouts = await lab.run(*({"index": index} for index in range(4, 68)))
    assert [rollout.attempt.reward for rollout in rollouts] == [2.5] * 64


def test_an_environment_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        agl.ConfigError, match="(?s)verifiers:nothing has no tasks to read: .*taskset 'nothing' not found"
    ):
        make_environment({**GUESS, "verifiers": "nothing"}).tasks("train")


@pytest.mark.soak
def test_grpo_trains_in_an_environment_of_verifiers(tmp_path: Path) -> None:
    train_two_steps(make_environment(GUESS), tmp_path, tasks_per_step=1)
