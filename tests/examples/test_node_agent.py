"""examples/node_agent: an agent of Node.js runs and trains as a command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from examples.node_agent import problems

from agentlightning import Rollout
from agentlightning_plugins.commands.train import command
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.algorithms.server_thread import threads_for_servers
from tests.source import REPO

PROBLEM = problems.train()[0]


def test_the_node_agent_calls_its_tool_and_prints_the_answer() -> None:
    wrong = [("calculator", {"expression": expression}) for expression in ("process.exit(3)", "1 / 0")]
    script = [Answer(tool_calls=wrong), Answer(tool_calls=[("calculator", {"expression": "7 / 2"})]), Answer(" 3.5")]
    with ScriptedOpenAI(script) as server:
        environment = {"OPENAI_BASE_URL": server.endpoint, "OPENAI_API_KEY": "any", "OPENAI_MODEL": "scripted"}
        done = subprocess.run(
            ["node", str(REPO / "examples" / "node_agent" / "agent.mjs")],
            input=PROBLEM, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, " 3.5\n", "")
    messages = server.requests[-1].body["messages"]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    said = [message["content"] for message in messages if message["role"] == "tool"]
    assert said == ["error: not an arithmetic expression", "error: division by zero", "3.5"]
    assert messages[1]["content"] == PROBLEM


def test_the_reward_of_the_node_agent_compares_the_last_line_with_the_right_number() -> None:
    answer = problems.ANSWERS[PROBLEM]
    given = [f"{answer}\n", f"thinking\n {answer}", f"{answer}\nno", "", f"{answer + 1}"]
    rollout = Rollout(rollout_id="ro-1", input=PROBLEM, start_time=0.0)
    assert [problems.reward(PROBLEM, output, rollout) for output in given] == [1.0, 1.0, 0.0, 0.0, 0.0]
    splits = [set(split()) for split in (problems.train, problems.val, problems.test)]
    assert not splits[0] & (splits[1] | splits[2])
    assert not splits[1] & splits[2]


def test_a_training_uses_the_tokens_of_the_node_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("steps=1", "tasks_per_step=2", "rollouts_per_task=4", "eval_every=0", "experience.keep_flat_groups=true")
    settings = [f"algorithm.{setting}" for setting in short]
    settings += ["data.val={source: 'problems.py:val', limit: 2}", f"run_dir={tmp_path / 'run'}"]
    monkeypatch.chdir(REPO)
    with threads_for_servers():
        done = CliRunner().invoke(command, ["examples/node_agent/train.yaml", *settings])
    assert done.exit_code == 0, done.output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [step for step in steps if "loss" in step]
    assert trained["rollouts"] == 8.0
    assert trained["rollouts_without_reward"] == 0.0
    assert trained["calls"] >= 8.0
    assert trained["calls_without_tokens"] == 0.0
    assert trained["logprob_gap_max"] < 1e-3
