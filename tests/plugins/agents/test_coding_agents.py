"""Coding agents, unmodified, repair a program in their workspace with a scripted model behind the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
import environments
from agentlightning.adapter import build_trajectories
from agentlightning_plugins.shared.presets.preset import FOLDER
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.plugins.agents.command_lab import command_span, run, tracer
from tests.plugins.gateway.gateway_setup import gateway
from tests.source import REPO
from tests.waiting import LIMIT_S

__all__ = ["tracer"]
REPAIR = "sed -i s/-/+/ calc.py && python3 check.py && echo repaired"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent ends
SHELLS = ("Bash", "bash", "shell", "exec_command", "run_shell_command", "shell_command", "local_shell")
DELEGATED = "Your part: repair add() in calc.py."
ENVIRONMENT = {"mini-swe-agent": "coding"} | {name: key for key, names in environments.AGENTS.items() for name in names}
PRESETS = [
    pytest.param(path.stem, marks=pytest.mark.soak if ENVIRONMENT[path.stem] == "npm-soak" else [], id=path.stem)
    for path in sorted(FOLDER.glob("*.yaml"))
]


def answer(request: RecordedRequest) -> Answer:
    """Runs a command with the agent's own shell tool, then says that it is done."""
    messages, tools = request.body["messages"], request.body.get("tools") or []
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    name = next((name for name in SHELLS if name in functions), None)
    if name is None:  # a title, for example
        return Answer("A title")
    done = [message for message in messages if message["role"] == "tool"]
    if "Agent" in functions and not done and DELEGATED not in json.dumps(messages):
        task = {"description": "Repair", "prompt": DELEGATED, "subagent_type": "general-purpose"}
        return Answer("", tool_calls=[("Agent", task)])
    if done and not ("repaired" in json.dumps(done) and len(functions) == 1 and len(done) == 1):
        return Answer("The function is repaired.")
    return Answer("", tool_calls=[(name, arguments_of(functions[name], SUBMIT if done else REPAIR))])


def arguments_of(function: dict[str, Any], command: str) -> dict[str, Any]:
    schema = function["parameters"]
    arguments: dict[str, Any] = {}
    for field in {*schema.get("required", ()), *({"command", "cmd"} & set(schema["properties"]))}:
        kind = schema["properties"][field].get("type")
        if field in ("command", "cmd"):
            arguments[field] = ["sh", "-c", command] if kind == "array" else command
        else:
            arguments[field] = {"boolean": False, "integer": 60_000, "number": 60_000}.get(kind, "Repairs it")
    return arguments


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "check.py").write_text("from calc import add\nassert add(1, 2) == 3\n")
    return folder


def install(preset: str) -> Path:
    """Installs the tested release of an agent; returns the folder of its program."""
    folder = ENVIRONMENT[preset]
    subprocess.run([sys.executable, REPO / ".ci" / "environments.py", folder], check=True, stdout=subprocess.DEVNULL)
    return REPO / ".venvs" / folder / ("bin" if folder == "coding" else "node_modules/.bin")


@pytest.mark.parametrize("preset", PRESETS)
async def test_a_coding_agent_repairs_a_program_and_every_call_is_recorded(
    tracer: agl.OtelTracer, workspace: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{install(preset)}{os.pathsep}{os.environ['PATH']}")
    check = [sys.executable, "check.py"]
    agent = agl.CommandAgent(preset=preset, workspace=workspace, reward=check, restore=["check.py"])
    async with ScriptedOpenAI(answer) as server, gateway(server) as case:
        resources = {"llm": case.proxy.as_resource(model="m")}
        task = "add() in calc.py is wrong. Repair it and run check.py."
        rollout, _ = await run(case.store, agent, task, resources=resources, timeout_s=LIMIT_S)
        spans = await case.spans(rollout)
    assert rollout.attempt.error is None, rollout.attempt.error
    assert rollout.attempt.reward == 1.0, command_span(spans).attributes
    assert "-    return a - b\n+    return a + b" in str(command_span(spans).attributes["agentlightning.command.diff"])
    triplets = agl.TraceToTriplet().adapt(spans)
    assert len(triplets) == len(server.requests) >= 2
    assert all(triplet.response["token_ids"] for triplet in triplets)
    calls = Counter(str(triplet.metadata["agent_name"]) for triplet in triplets)
    assert calls.keys() == ({preset, "subagent"} if preset == "claude-code" else {preset})
    for name, count in calls.items():
        assert len(agl.TraceToTriplet(agent_match=f"^{name}$").adapt(spans)) == count
    found = build_trajectories(triplets)
    assert (
        len(found.trajectories) == len({triplet.metadata.get("conversation_id") for triplet in triplets}) == len(calls)
    )
    assert found.mismatches == []
    assert found.left_out.keys() <= {"side_call"}  # a title
