"""`agl replay`: a recorded rollout runs again without its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.types import Span
from agentlightning_plugins.commands.replay import _to_answer
from agentlightning_plugins.shared.configuration.sources import load_attribute
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.plugins.commands.agl_here import Said, run_here

AGENT = """
import json
import openai
import agentlightning as agl

def agent(task, llm: agl.LLM):
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0)
    messages = [{"role": "user", "content": QUESTION.format(**task)}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    first = client.chat.completions.create(model=llm.model, messages=messages, tools=tools).choices[0].message
    call = first.tool_calls[0]
    messages.append(first.model_dump(exclude_none=True))
    numbers = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
    answer = client.chat.completions.create(model=llm.model, messages=messages, tools=tools).choices[0].message.content
    return float(answer == task["answer"])

QUESTION = "What is {a} and {b}?"
"""


@pytest.fixture
async def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    return await record(tmp_path, AGENT, [Answer(tool_calls=[("add", {"a": 1, "b": 2})]), Answer("3")])


async def record(tmp_path: Path, source: str, script: Sequence[Answer]) -> str:
    """Runs an agent once with scripted answers; returns the id of the rollout."""
    (tmp_path / "replayed_agent.py").write_text(source)
    async with ScriptedOpenAI(script) as server:
        trainer = agl.Trainer(
            algorithm={"name": "baseline", "train_split": 1.0},
            store=f"sqlite:///{tmp_path / 'store.db'}",
            strategy="shm",
            trackers=[],
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="scripted")},
        )
        agent = load_attribute(f"{tmp_path / 'replayed_agent.py'}:agent")
        await asyncio.to_thread(trainer.fit, agent, [{"a": 1, "b": 2, "answer": "3"}])
        assert trainer.store is not None
        await trainer.store.close()
    store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
    (rollout,) = (await store.query_rollouts()).items
    await store.close()
    return rollout.rollout_id


def replay(folder: Path, rollout_id: str, *options: str, agent: str = "replayed_agent.py:agent") -> Said:
    command = ("replay", agent, rollout_id, "--store", "sqlite:///store.db", *options)
    return run_here(folder, *command, module="replayed_agent")


@pytest.mark.parametrize("spec", ["replayed_agent.py:agent", "{target: 'replayed_agent.py:agent'}"])
async def test_the_agent_of_a_configuration_gets_the_reward_of_the_option(
    tmp_path: Path, recorded: str, spec: str
) -> None:
    source = (
        AGENT.replace("return float(answer == ", "return None; (") + "def rate(task, output, rollout): return 0.25\n"
    )
    (tmp_path / "replayed_agent.py").write_text(source)
    (tmp_path / "train.yaml").write_text(f"agent: {spec}\nalgorithm: baseline\ndata: {{train: tasks.jsonl}}\n")
    options = ("--reward", "replayed_agent.py:rate")
    rated = await asyncio.to_thread(replay, tmp_path, recorded, *options, "--json", agent="train.yaml")
    assert json.loads(rated.stdout)["reward"] == 0.25, rated.stderr


async def test_a_second_reward_is_refused(tmp_path: Path, recorded: str) -> None:
    agent = "{target: 'replayed_agent.py:agent', reward: 'replayed_agent.py:rate'}"
    (tmp_path / "train.yaml").write_text(f"agent: {agent}\nalgorithm: baseline\ndata: {{train: tasks.jsonl}}\n")
    refused = await asyncio.to_thread(replay, tmp_path, recorded, "--reward", "x.py:rate", agent="train.yaml")
    assert refused.code == 2
    assert "agent.reward of train.yaml defines the reward; remove --reward or agent.reward" in refused.stderr


async def test_a_rollout_is_replayed_without_its_model_and_differences_are_reported(
    tmp_path: Path, recorded: str
) -> None:
    same = await asyncio.to_thread(replay, tmp_path, recorded)
    assert same.code == 0, same.stderr + same.stdout
    assert "succeeded, reward 1.0, 2 of 2 recorded model calls" in same.stdout

    (tmp_path / "replayed_agent.py").write_text(AGENT.replace("What is", "How much is"))
    asked = await asyncio.to_thread(replay, tmp_path, recorded)
    assert asked.code == 1
    assert "call 1, message 1: ('user', 'What is 1 and 2?') then, ('user', 'How much is 1 and 2?') now" in asked.stdout

    (tmp_path / "replayed_agent.py").write_text(AGENT.replace("float(answer ==", "float(answer !="))
    worth = await asyncio.to_thread(replay, tmp_path, recorded, "--json")
    said = json.loads(worth.stdout)
    assert (worth.code, said["differences"]) == (1, ["reward: 1.0 then, 0.0 now"])
    assert (said["reward"], said["recorded_reward"], said["calls"], said["recorded_calls"]) == (0.0, 1.0, 2, 2)

    more = AGENT.replace(
        "    return float", "    client.chat.completions.create(model='x', messages=messages)\n    return float"
    )
    (tmp_path / "replayed_agent.py").write_text(more)
    further = await asyncio.to_thread(replay, tmp_path, recorded)
    assert further.code == 1
    assert "the recording has 2 model calls, and this is one more" in further.stderr
    assert "2 model calls then, 3 now" in further.stdout


async def test_an_unknown_rollout_or_agent_is_reported(tmp_path: Path, recorded: str) -> None:
    unknown = await asyncio.to_thread(replay, tmp_path, "ro-none")
    assert (unknown.code, "no rollout 'ro-none'" in unknown.stderr) == (2, True)
    missing = await asyncio.to_thread(replay, tmp_path, recorded, agent="replayed_agent.py:agen")
    assert (missing.code, "Did you mean 'agent'?" in missing.stderr) == (2, True)


OWN_CLIENTS = """
import aiohttp, httpx, openai, requests

LIVE = "http://127.0.0.1:9/v1"  # refuses connections
MESSAGES = [{"role": "user", "content": "What is 1 and 2?"}]
BODY = {"model": "x", "messages": MESSAGES}
client = openai.OpenAI(base_url=LIVE, api_key="mine", max_retries=0)

async def by_aiohttp():
    async with aiohttp.ClientSession() as session, session.post(LIVE + "/chat/completions", json=BODY) as answer:
        return await answer.json()

async def agent(task):
    client.chat.completions.create(**BODY)
    calls = [httpx.post(LIVE + "/chat/completions", json=BODY).json(), await by_aiohttp()]
    calls.append(requests.post(LIVE + "/messages", json=BODY).json())
    async with openai.AsyncOpenAI(base_url=LIVE, api_key="mine", max_retries=0) as own:
        calls.append((await own.responses.create(model="x", input="What is 1 and 2?")).model_dump())
    return float(len(calls))
"""

OTHER_CALLS = """
import httpx

def agent(task):
    try:
        httpx.post("http://127.0.0.1:9/messages", json={"text": "no call of a model"})
    except httpx.ConnectError:
        httpx.post("http://127.0.0.1:9/v1beta/models/g:generateContent", json={"contents": []})
"""


async def test_clients_that_the_agent_creates_itself_get_the_recorded_answers(tmp_path: Path, recorded: str) -> None:
    (tmp_path / "replayed_agent.py").write_text(OWN_CLIENTS)
    said = await asyncio.to_thread(replay, tmp_path, recorded, "--json")
    result = json.loads(said.stdout)
    assert result["calls"] == 5
    assert result["differences"][-2:] == ["2 model calls then, 5 now", "reward: 1.0 then, None now"]
    assert "the recording has 2 model calls, and this is one more" in said.stderr, "the last call was answered too"


async def test_a_model_call_that_cannot_be_replayed_is_refused_and_other_requests_are_sent(
    tmp_path: Path, recorded: str
) -> None:
    (tmp_path / "replayed_agent.py").write_text(OTHER_CALLS)
    said = await asyncio.to_thread(replay, tmp_path, recorded, "--json")
    assert json.loads(said.stdout)["calls"] == 0
    assert "g:generateContent cannot be replayed: its API is neither OpenAI's nor Anthropic's" in said.stderr


BROKEN_ARGUMENTS = """
import openai
import agentlightning as agl

def agent(task, llm: agl.LLM):
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0)
    messages = [{"role": "user", "content": "add"}]
    message = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message
    return float([call.function.arguments for call in message.tool_calls] == ['{"a": 1}', '{"a": 1'])
"""


async def test_a_tool_call_whose_arguments_are_not_json_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = Answer(tool_calls=[("add", '{"a": 1}'), ("add", '{"a": 1')])
    rollout_id = await record(tmp_path, BROKEN_ARGUMENTS, [answer])
    said = await asyncio.to_thread(replay, tmp_path, rollout_id)
    assert said.code == 0, said.stderr + said.stdout
    assert "succeeded, reward 1.0, 1 of 1 recorded model calls" in said.stdout


def test_recorded_arguments_of_a_tool_are_not_formatted_again() -> None:
    parts = [{"type": "tool_call", "id": "1", "name": "add", "arguments": text} for text in ('{"a":1}', "")]
    messages = json.dumps([{"role": "assistant", "parts": parts}])
    span = Span.from_attributes(
        attributes={semconv.GEN_AI_OUTPUT_MESSAGES: messages}, rollout_id="ro-1", attempt_id="at-1", name="chat"
    )
    assert _to_answer(span).tool_calls == [("add", '{"a":1}'), ("add", "{}")]
