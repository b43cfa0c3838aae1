"""`agl rollouts export --format openai-sft`: conversations of good rollouts, in the format of OpenAI's fine-tuning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import agentlightning as agl
from agentlightning.cli import cli
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.algorithms.prompt_lab import Server

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


def model(request: RecordedRequest) -> Answer:
    last = request.body["messages"][-1]
    if last["role"] == "user" and request.body.get("tools"):
        return Answer(tool_calls=[("add", {"a": 1, "b": 2})], reasoning="let me add")
    return Answer(f"after {last['content']}")


def agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Makes two calls that form one conversation with a tool, and one separate call."""
    import openai

    agl.emit_state(text=task["text"])
    with openai.OpenAI(base_url=llm.endpoint, api_key="any") as client:
        messages: list[Any] = [{"role": "system", "content": "be good"}, {"role": "user", "content": task["text"]}]
        reply = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        call = reply.choices[0].message.tool_calls[0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "summarise"}])
    if task["reward"] is None:
        raise RuntimeError("failed")
    return float(task["reward"])


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedOpenAI]:
    with Server(model) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def place(server: ScriptedOpenAI, tmp_path_factory: pytest.TempPathFactory) -> Path:
    for implementation in get_manager().hook.add_commands.get_hookimpls():
        implementation.function(cli)
    folder = tmp_path_factory.mktemp("run")
    tasks = [{"text": f"task {reward}", "reward": reward} for reward in (1.0, 0.6, 0.2, None)]
    agl.Trainer(
        algorithm="baseline",
        store=f"sqlite:///{folder / 'store.db'}",
        strategy="shm",
        trackers=[],
        initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
    ).fit(agent, tasks, [{"text": "validation", "reward": 1.0}])
    return folder


def export(place: Path, file: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["rollouts", "export", str(file), "--store", str(place), *arguments])
    assert result.exit_code == code, result.output
    return result


def test_conversations_of_good_rollouts_are_written_in_the_format_of_fine_tuning(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "sft.jsonl"
    result = export(place, file, "--format", "openai-sft", "--min-reward", "0.5")
    assert "4 conversations in" in result.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["messages"][1]["content"] for line in lines if len(line["messages"]) == 5} == {"task 1.0", "task 0.6"}
    long = next(line for line in lines if len(line["messages"]) == 5)
    assert [message["role"] for message in long["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    asks, answers, says = long["messages"][2:]
    assert asks["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    assert answers["tool_call_id"] == asks["tool_calls"][0]["id"]
    assert says == {"role": "assistant", "content": "after 3"}
    assert [tool["function"]["name"] for tool in long["tools"]] == ["add"]
    short = next(line for line in lines if len(line["messages"]) == 2)
    assert short == {
        "messages": [{"role": "user", "content": "summarise"}, {"role": "assistant", "content": "after summarise"}]
    }


def test_transitions_are_exported_with_the_state_in_which_each_call_began(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "transitions.jsonl"
    result = export(place, file, "--format", "transitions")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert f"{len(lines)} transitions in" in result.output
    assert {json.dumps(line["state"]) for line in lines} >= {'{"text": "task 1.0"}', '{"text": "validation"}'}
    for line in lines:
        assert set(line) == {"state", "observation", "action", "reward", "next_index", "metadata"}
        assert line["observation"]["raw_content"]
        assert line["action"]["raw_content"][0]["role"] == "assistant"
        assert line["metadata"]["rollout_id"].startswith("ro-")
    assert {line["reward"] for line in lines} >= {1.0, 0.6}
    export(place, tmp_path / "x.parquet", "--format", "transitions", code=2)


def test_only_successful_rollouts_with_at_least_the_minimum_reward_are_exported(place: Path, tmp_path: Path) -> None:
    for threshold, count in ((1.0, 2), (0.0, 6), (1.1, 0)):
        file = tmp_path / f"{threshold}.jsonl"
        export(place, file, "--format", "openai-sft", "--min-reward", str(threshold))
        assert len(file.read_text().splitlines()) == count
        assert "validation" not in file.read_text()


def test_the_number_of_excluded_validation_rollouts_is_reported(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "agentlightning"):
        export(place, tmp_path / "sft.jsonl", "--format", "openai-sft")
    assert "1 of 4 rollouts are excluded, because they belong to validation or test" in caplog.text


def test_a_file_name_or_status_that_does_not_suit_the_format_is_refused(place: Path, tmp_path: Path) -> None:
    for arguments in (
        ("x.parquet", "--format", "openai-sft"),
        ("x.jsonl", "--format", "openai-sft", "--status", "failed"),
    ):
        file = tmp_path / arguments[0]
        assert "writes only .jsonl files" in export(place, file, *arguments[1:], code=2).output
        assert not file.exists()
