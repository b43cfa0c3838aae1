"""Agents written for five clients and frameworks run through the gateway unchanged, and every call is recorded.

The conformance tests of the integrations send calls of the other frameworks through the gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.types import Span, Triplet
from agentlightning_plugins.shared.scripted_model.server import (
    EOS,
    Answer,
    RecordedRequest,
    ScriptedOpenAI,
    encode,
    logprob,
)
from tests.plugins.gateway.gateway_client import CLIENTS, KEY
from tests.plugins.gateway.gateway_setup import PROVIDER_KEY, gateway

pytestmark = [pytest.mark.environment("main"), pytest.mark.slow]  # needs all frameworks

CALL = 'add{"a": 1, "b": 2}'
TOLD_TO_ADD = ["<call>", "3, I think."]
EXPECTED: dict[str, tuple[list[Any], list[str]]] = {
    # The answers that the agent gets, and the answers in the recorded calls.
    "openai": (
        ["Hello!", "Hello!", [["add", '{"a": 1, "b": 2}']], "Hello!", "Hello!", ["m"]],
        ["Hello!", "Hello!", "<call>", "Hello!", "Hello!"],
    ),
    "anthropic": (["Hello!", "Hello!", "3, I think.", ["m"]], ["Hello!", "Hello!", *TOLD_TO_ADD]),
    "litellm": (["Hello!"] * 4, ["Hello!"] * 4),
    "langchain": (
        ["Hello!", "Hello!", "3, I think.", "Hello!", "Hello!"],
        ["Hello!", "Hello!", *TOLD_TO_ADD, "Hello!", "Hello!"],
    ),
    "openai_agents": (["3, I think."] * 4, TOLD_TO_ADD * 4),
}
QUIET = {"OTEL_SDK_DISABLED": "true", "OPENAI_AGENTS_DISABLE_TRACING": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def answer(request: RecordedRequest) -> Answer:
    if request.body["messages"][-1]["role"] == "tool":
        return Answer("3, I think.")
    return Answer(tool_calls=[("add", {"a": 1, "b": 2})]) if request.body.get("tools") else Answer("Hello!")


def token_ids(said: str) -> list[int]:
    return [*encode(f"<tool_call>{CALL}" if said == "<call>" else said), EOS]


@dataclass
class Outcome:
    said: list[Any]
    spans: list[Span]
    triplets: list[Triplet]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The outcome of every client; one process runs all of them, in a temporary home folder, against one gateway."""
    return asyncio.run(run_all(tmp_path_factory.mktemp("home")))


async def run_all(home: Path) -> dict[str, Outcome]:
    async with ScriptedOpenAI(answer, api_key=PROVIDER_KEY) as server, gateway(server) as case:
        started = {name: await case.start() for name in CLIENTS}
        urls = [(name, str(client.base_url).removesuffix("/")) for name, (_, client) in started.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-m", "tests.plugins.gateway.gateway_client", str(home / "said"),
            *itertools.chain(*urls),
            env={**os.environ, **QUIET, "HOME": str(home), "XDG_DATA_HOME": str(home)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        said = json.loads((home / "said").read_text(encoding="utf-8"))
        spans = {name: await case.spans(rollout) for name, (rollout, _) in started.items()}
        return {name: Outcome(said[name], spans[name], TraceToTriplet().adapt(spans[name])) for name in CLIENTS}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_agent_runs_unchanged_and_every_call_becomes_a_triplet(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome, (told, answered) = outcomes[name], EXPECTED[name]
    assert outcome.said == told
    expected = [token_ids(said) for said in answered]
    assert [triplet.response["token_ids"] for triplet in outcome.triplets] == expected
    assert [triplet.response["logprobs"] for triplet in outcome.triplets] == [[*map(logprob, ids)] for ids in expected]
    assert all(triplet.prompt["token_ids"] for triplet in outcome.triplets)
    refused = [span.status.description or "" for span in outcome.spans if span.status.status_code == "ERROR"]
    assert ["'thread' needs a server" in text for text in refused] == ([True] if name == "anthropic" else [])
    assert not any(KEY in span.model_dump_json() for span in outcome.spans)


@pytest.mark.parametrize("name", ["anthropic", "langchain", "openai_agents"])
def test_the_result_of_a_tool_is_part_of_the_next_request(name: str, outcomes: dict[str, Outcome]) -> None:
    spans = [span for span in outcomes[name].spans if "3, I think." in str(semconv.read_output_messages(span))]
    assert spans
    for span in spans:
        *_, asked, result = semconv.read_input_messages(span)
        (call,) = asked["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
        assert (result["role"], result["tool_call_id"]) == ("tool", call["id"])
        assert "3" in result["content"]
        assert [tool["function"]["name"] for tool in semconv.read_tools(span)] == ["add"]
