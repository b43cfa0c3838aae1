"""examples/coding: the repair tasks, and the agent that works on them with a scripted model."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.coding import agents, problems, warm_start

import agentlightning as agl
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.plugins.agents.command_lab import run, store
from tests.plugins.agents.test_coding_agents import SHELLS, arguments_of, install
from tests.plugins.gateway.gateway_setup import gateway
from tests.waiting import LIMIT_S

__all__ = ["store"]


def first(split: problems.Split, count: int, folder: Path) -> list[problems.Problem]:
    return list(itertools.islice(problems.problem_stream(split, 0, folder), count))


def test_texts_and_bugs_of_a_split_occur_in_no_other(tmp_path: Path) -> None:
    found = [first(split, 800, tmp_path) for split in ("train", "val", "test")]
    texts = [{task["text"] for task in tasks} for tasks in found]
    bugs = [{tuple(task["name"].split("-")[:2]) for task in tasks} for tasks in found]
    for sets in (texts, bugs):
        assert all(one.isdisjoint(other) for one, other in itertools.combinations(sets, 2))
    assert [len(one) for one in bugs] == [40, 8, 8]
    assert sum(map(len, texts)) == 4 * 32


def test_only_the_right_expression_passes_the_check(tmp_path: Path) -> None:
    for task in first("test", 8, tmp_path):
        right, *_, a, b = task["name"].split("-")
        folder = tmp_path / task["name"]
        passed = []
        for name, expression in problems.REPAIRS.items():
            program = f"def compute({a}, {b}):\n    return {expression.format(a=a, b=b)}\n"
            (folder / "program.py").write_text(program)
            done = subprocess.run([sys.executable, "check.py"], cwd=folder, capture_output=True, check=False)
            passed += [name] if done.returncode == 0 else []
        assert passed == [right]


@pytest.mark.parametrize("looks", [True, False], ids=["it looks", "it guesses"])
async def test_the_agent_repairs_a_program_if_its_commands_do(store: agl.LightningStore, looks: bool) -> None:
    (task,) = first("train", 1, problems.WORKSPACES)
    a, b = task["name"].split("-")[2:] if looks else ("no", "names")
    commands = [warm_start.LOOK, warm_start.REPAIR.format(expression=f"{a} + {b}"), f"echo {warm_start.SUBMIT}"]
    script = [Answer("", tool_calls=[("bash", {"command": line})]) for line in commands]
    async with ScriptedOpenAI(script) as server:
        resources = {"llm": agl.LLM(endpoint=server.endpoint, model="scripted")}
        rollout, _ = await run(store, agents.bash, dict(task), resources=resources)
    assert rollout.attempt.error is None
    assert rollout.attempt.reward == float(looks)
    messages = server.requests[-1].body["messages"]
    assert [message["role"] for message in messages] == ["system", "user", *["assistant", "tool"] * 2]
    shown = json.loads(messages[3]["content"])
    assert shown == {"returncode": 0, "output": (problems.WORKSPACES / task["name"] / "program.py").read_text()}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["claude", "codex", "mini"])
async def test_other_coding_agents_repair_the_programs_of_the_example(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent: agl.CommandAgent = getattr(agents, name)
    monkeypatch.setenv("PATH", f"{install(agent.name)}{os.pathsep}{os.environ['PATH']}")
    (task,) = first("train", 1, problems.WORKSPACES)
    a, b = task["name"].split("-")[2:]
    commands = [warm_start.LOOK, warm_start.REPAIR.format(expression=f"{a} + {b}"), f"echo {warm_start.SUBMIT}"]

    def answer(request: RecordedRequest) -> Answer:
        body = request.body
        functions = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
        shell = next((name for name in SHELLS if name in functions), None)
        turn = sum(message["role"] == "tool" for message in body["messages"])
        if shell is None or turn == len(commands) - (len(functions) > 1):  # a title, or the end
            return Answer("Done.")
        return Answer("", tool_calls=[(shell, arguments_of(functions[shell], commands[turn]))])

    async with ScriptedOpenAI(answer) as server, gateway(server) as case:
        resources = {"llm": case.proxy.as_resource(model="m")}
        rollout, _ = await run(case.store, agent, dict(task), resources=resources, timeout_s=LIMIT_S)
    assert rollout.attempt.error is None, rollout.attempt.error
    assert rollout.attempt.reward == 1.0
