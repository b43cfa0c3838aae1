"""`agl replay`: a recorded rollout again, without its model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.testing.openai_server import Answer, ScriptedOpenAI

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
async def recorded(tmp_path: Path) -> str:
    (tmp_path / "replayed_agent.py").write_text(AGENT)
    script = [Answer(tool_calls=[("add", {"a": 1, "b": 2})]), Answer("3")]
    async with ScriptedOpenAI(script) as server:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        program = (
            "import agentlightning as agl, replayed_agent as a\n"
            f"llm = agl.LLM(endpoint={server.endpoint!r}, model='scripted')\n"
            "agl.Trainer(algorithm={'name': 'baseline', 'train_split': 1.0}, store='sqlite:///store.db',\n"
            "    strategy='shm', trackers=[], initial_resources={'llm': llm})"
            ".fit(a.agent, [{'a': 1, 'b': 2, 'answer': '3'}])\n"
        )
        await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment, timeout=60
        )
    store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}")
    (rollout,) = (await store.query_rollouts()).items
    await store.close()
    return rollout.rollout_id


def replay(folder: Path, rollout_id: str, agent: str = "replayed_agent.py:agent") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentlightning", "replay", agent, rollout_id, "--store", "sqlite:///store.db"],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_a_rollout_is_replayed_without_its_model_and_differences_are_said(tmp_path: Path, recorded: str) -> None:
    same = await asyncio.to_thread(replay, tmp_path, recorded)
    assert same.returncode == 0, same.stderr + same.stdout
    assert "succeeded, reward 1.0, 2 of 2 recorded model calls" in same.stdout

    (tmp_path / "replayed_agent.py").write_text(AGENT.replace("What is", "How much is"))
    asked = await asyncio.to_thread(replay, tmp_path, recorded)
    assert asked.returncode == 1
    assert "call 1, message 1: ('user', 'What is 1 and 2?') then, ('user', 'How much is 1 and 2?') now" in asked.stdout

    (tmp_path / "replayed_agent.py").write_text(AGENT.replace("float(answer ==", "float(answer !="))
    worth = await asyncio.to_thread(replay, tmp_path, recorded)
    assert (worth.returncode, "reward: 1.0 then, 0.0 now" in worth.stdout) == (1, True)

    more = AGENT.replace(
        "    return float", "    client.chat.completions.create(model='x', messages=messages)\n    return float"
    )
    (tmp_path / "replayed_agent.py").write_text(more)
    further = await asyncio.to_thread(replay, tmp_path, recorded)
    assert further.returncode == 1
    assert "the recording holds 2 model calls, and this is one more" in further.stderr
    assert "2 model calls then, 3 now" in further.stdout


async def test_what_cannot_be_replayed_is_said(tmp_path: Path, recorded: str) -> None:
    unknown = await asyncio.to_thread(replay, tmp_path, "ro-none")
    assert (unknown.returncode, "no rollout 'ro-none'" in unknown.stderr) == (2, True)
    missing = await asyncio.to_thread(replay, tmp_path, recorded, "replayed_agent.py:agen")
    assert (missing.returncode, "Did you mean 'agent'?" in missing.stderr) == (2, True)
