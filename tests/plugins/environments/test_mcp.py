"""Servers of the Model Context Protocol as environments: release 1 of the client in ``main``, 2 in ``newest``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from agentlightning.environment import Environment
from agentlightning.testing.agent import Answer, Lab
from agentlightning.testing.environment import EnvironmentConformance, EnvironmentEpisode
from agentlightning_plugins.environments.loop import make_environment
from agentlightning_plugins.environments.mcp import McpEnvironment
from agentlightning_plugins.shared.scripted_model.server import RecordedRequest
from tests.plugins.environments.servers import FOLDER, Server, serving

pytestmark = pytest.mark.environment("main", "newest")
PROGRAM = str(FOLDER / "mcp_server.py")
STDIO = [sys.executable, PROGRAM]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("mcp"), *STDIO, "{port}") as server:
        yield server


class _TakesStones(EnvironmentConformance):
    tasks: ClassVar = [{"question": "Take 2 of 9 stones.", "have": 9}, {"question": "Take 2 of 5 stones.", "have": 5}]
    ends = False

    def act(self, observations: list[str]) -> Any:
        have = int(observations[0].split()[3])
        return "done" if len(observations) > 2 else ("take", {"have": have, "count": 2})


@pytest.mark.slow
class TestStdio(_TakesStones):
    """The tests that a process for each episode could fail; TestHTTP has the others."""

    at_once = 4
    test_a_seed_repeats_its_episode_and_seeds_differ = None
    test_reset_is_independent_of_the_last_episode = None
    test_a_step_after_the_end_is_refused = None
    test_it_is_an_agent_whose_calls_and_rewards_are_recorded = None

    @pytest.fixture
    def environment(self) -> Environment:
        return McpEnvironment(STDIO)


@pytest.mark.slow
class TestHTTP(_TakesStones):
    at_once = 16

    @pytest.fixture
    def environment(self, http: Server) -> Environment:
        return McpEnvironment(f"http://127.0.0.1:{http.port}/mcp")


async def _call(environment: Environment, *names: str) -> list[str]:
    async with EnvironmentEpisode(environment) as episode:
        await episode.reset("go")
        await episode.read_tools()
        return [
            str(await episode.call(name, '{"have": 3, "count": "x"}' if name == "take" else "{}")) for name in names
        ]


async def test_an_error_of_a_tool_and_a_wrong_call_are_shown_to_the_model() -> None:
    failed, wrong, unknown = await _call(McpEnvironment(STDIO), "fail", "take", "tke")
    assert "Error executing tool fail" in failed  # release 2 keeps the message from the model
    assert "count" in wrong
    assert unknown == "error: there is no tool 'tke'; the tools are take, die, hang, fail"


async def test_the_configured_tools_are_offered() -> None:
    environment = make_environment({"mcp": STDIO, "tools": ["take"], "max_turns": 3})
    assert environment.max_turns == 3
    async with EnvironmentEpisode(environment) as episode:
        await episode.reset("go")
        (tool,) = await episode.read_tools()
    assert tool["function"]["name"] == "take"
    assert tool["function"]["description"] == "Take stones; returns how many are left."
    assert set(tool["function"]["parameters"]["properties"]) == {"have", "count"}
    with pytest.raises(agl.ConfigError, match=r"has no tool 'tak'\. Did you mean 'take'\? Its tools: take, die"):
        await _call(make_environment({"mcp": STDIO, "tools": ["tak"]}))


async def test_a_server_that_dies_or_hangs_fails_its_own_episode_with_the_reason() -> None:
    hanging = make_environment({"mcp": STDIO, "timeout_s": 20})
    good, dead, hung = await asyncio.gather(
        _call(McpEnvironment(STDIO), "take"), _call(McpEnvironment(STDIO), "die"), _call(hanging, "hang"),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(good, list)
    assert isinstance(dead, agl.RolloutError)
    assert "did not answer the call of die" in str(dead)
    assert "the server is about to end" in str(dead)
    assert isinstance(hung, agl.RolloutError)
    assert str(hung) == "McpEnvironment.call took longer than 20 s (timeout_s)"


async def test_a_server_that_cannot_start_is_named_with_what_it_said() -> None:
    with pytest.raises(agl.RolloutError, match="there is no stone") as failure:
        await _call(McpEnvironment([sys.executable, "-c", "raise SystemExit('there is no stone')"]))
    assert "cannot be used" in str(failure.value)
    with pytest.raises(agl.RolloutError, match="the MCP server 'no-such-program' cannot be used: FileNotFoundError"):
        await _call(McpEnvironment(["no-such-program"]))
    with pytest.raises(agl.ConfigError, match="give a list, such as"):
        McpEnvironment("server.py")


async def test_a_killed_server_costs_the_episodes_that_ran_in_it_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path, *STDIO, "{port}") as server:
        environment = make_environment({"mcp": f"http://127.0.0.1:{server.port}/mcp", "timeout_s": 10})
        began = asyncio.Event()

        def script(request: RecordedRequest) -> Answer:
            called = [each for each in request.body["messages"] if each["role"] == "tool"]
            if request.body["messages"][0]["content"] == "hang" and not called:
                began.set()
                return Answer(tool_calls=[("hang", {})])
            return Answer("done") if called else Answer(tool_calls=[("take", {"have": 3, "count": 1})])

        async def kill(ids: list[str]) -> None:
            await began.wait()
            await asyncio.to_thread(server.kill)

        async with Lab(environment, script, reward=None) as lab:
            (before,) = await lab.run("take")
            (during,) = await lab.run("hang", meanwhile=kill)
            await asyncio.to_thread(server.start)
            (after,) = await lab.run("take")
    assert [rollout.status for rollout in (before, during, after)] == ["succeeded", "failed", "succeeded"]
