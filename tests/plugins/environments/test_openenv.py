"""Environments on a server of OpenEnv, which runs in the environment ``openenv``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.environment import Environment
from agentlightning.testing.agent import Answer, Lab
from agentlightning.testing.environment import EnvironmentConformance, EnvironmentEpisode
from agentlightning_plugins.environments.loop import make_environment
from agentlightning_plugins.environments.openenv import OpenEnvEnvironment
from agentlightning_plugins.shared.scripted_model.server import RecordedRequest
from tests.plugins.environments.servers import FOLDER, Server, serving
from tests.plugins.environments.training import train_two_steps
from tests.source import REPO

pytestmark = pytest.mark.slow
SESSIONS = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, REPO / ".ci" / "environments.py", "openenv"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    python = REPO / ".venvs" / "openenv" / "bin" / "python"
    program = (str(python), str(FOLDER / "openenv_server.py"), "{port}", str(SESSIONS))
    with serving(tmp_path_factory.mktemp("openenv"), *program) as running:
        yield running


def _address(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


class TestOpenEnv(EnvironmentConformance):
    """More episodes than the server has sessions run at once, so that some wait."""

    @pytest.fixture
    def environment(self, server: Server) -> Environment:
        return OpenEnvEnvironment(_address(server))

    def act(self, observations: list[str]) -> str:
        return str(len(observations) - 1)


class TestToolOfOpenEnv(EnvironmentConformance):
    """Actions with several fields are calls of a tool."""

    @pytest.fixture
    def environment(self, server: Server) -> Environment:
        return OpenEnvEnvironment(f"{_address(server)}/counting")

    def act(self, observations: list[str]) -> tuple[str, dict[str, int]]:
        return "act", {"guess": len(observations) - 1, "step": 1}


async def test_the_fields_of_a_task_are_arguments_of_reset_and_a_wrong_action_is_told_to_the_model(
    server: Server,
) -> None:
    async with EnvironmentEpisode(make_environment(f"openenv:{_address(server)}")) as episode:
        assert await episode.reset({"highest": 3}) == "a number from 0 to 3"
        with pytest.raises(agl.RolloutError, match="invalid literal for int"):
            await episode.step("three")
    async with EnvironmentEpisode(make_environment(f"openenv:{_address(server)}/counting")) as episode:
        await episode.reset({"seed": 1})
        (tool,) = await episode.read_tools()
        assert set(tool["function"]["parameters"]["properties"]) == {"guess", "step"}
        assert str(await episode.call("act", '{"guess": "x"}')).startswith("error: ")
        assert await episode.step("1") == "error: act by a call of the tool act"


def test_grpo_trains_on_a_server_of_openenv(server: Server, tmp_path: Path) -> None:
    train_two_steps(make_environment({"openenv": f"{_address(server)}/counting", "max_turns": 2}), tmp_path)


async def test_a_server_that_does_not_answer_is_named() -> None:
    async with EnvironmentEpisode(make_environment("openenv:http://127.0.0.1:9")) as episode:
        with pytest.raises(agl.RolloutError, match="http://127.0.0.1:9 does not answer as a server of OpenEnv"):
            await episode.reset({"seed": 1})


async def test_a_killed_server_costs_the_episodes_that_ran_in_it_and_nothing_else(server: Server) -> None:
    environment = make_environment({"openenv": _address(server), "timeout_s": 100})
    began = asyncio.Event()

    def script(request: RecordedRequest) -> Answer:
        if "from 0 to 7" in str(request.body["messages"]):
            began.set()
            return Answer("hang")
        return Answer(str(sum(each["role"] == "assistant" for each in request.body["messages"])))

    async def kill(ids: list[str]) -> None:
        await began.wait()
        await asyncio.to_thread(server.kill)

    async with Lab(environment, script, reward=None) as lab:
        (before,) = await lab.run({"seed": 1})
        (during,) = await lab.run({"seed": 1, "highest": 7}, meanwhile=kill)
        await asyncio.to_thread(server.start)
        (after,) = await lab.run({"seed": 1})
    assert [rollout.status for rollout in (before, during, after)] == ["succeeded", "failed", "succeeded"]
    assert during.attempt.error is not None
    assert "has ended" in during.attempt.error.message
