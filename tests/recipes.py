"""The agents of docs/frameworks.md: their code, and the row of the table that a run of each gives."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.testing.agent import AGENT_NAME, Answer, Lab, answer, ask
from agentlightning_plugins.shared.scripted_model.server import RecordedRequest
from tests.source import REPO

PAGE: Final = (REPO / "docs" / "frameworks.md").read_text(encoding="utf-8")


def read_block(title: str, language: str) -> str:
    """Returns the first block of a section of the page in a language; empty if it has none. No title: of the page."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0] if title else PAGE
    found = re.search(rf"^```{language}[^\n]*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def load(title: str, folder: Path) -> agl.LitAgent[Any]:
    """Returns the agent of a section of the page, from a file: smolagents reads the source of its tools."""
    path = folder / "agent.py"
    path.write_text(read_block("", "python") + read_block(title, "python"), encoding="utf-8")
    agent: agl.LitAgent[Any] = runpy.run_path(str(path))["agent"]
    return agent


def answer_any(request: RecordedRequest) -> Answer:
    """Answers as ``answer`` does, in the forms that DSPy and smolagents ask for."""
    text = str(request.body["messages"])
    tools = [tool["function"]["name"] for tool in request.body.get("tools") or ()]
    if "[[ ##" in text:
        return Answer("[[ ## answer ## ]]\nThe sum is 5.\n\n[[ ## completed ## ]]")
    if "final_answer" in tools and "Observation" in text:
        return Answer(tool_calls=[("final_answer", {"answer": "The sum is 5."})])
    own = answer(request)
    if own.tool_calls and "mcp__own__add" in tools:
        return replace(own, tool_calls=[("mcp__own__add", arguments) for _, arguments in own.tool_calls])
    return own


def read_row(title: str) -> Mapping[str, str]:
    """Returns the row of a framework in the page's table, by column."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    head, row = lines[0], next(line for line in lines if line.startswith(f"| [{title}]"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)]
    return dict(zip(*cells, strict=True))


async def run(title: str, tracer: str, folder: Path) -> tuple[bool, bool]:
    """Runs an agent and checks its training data; returns whether its tools are recorded, and its calls streamed."""
    async with Lab(load(title, folder), answer_any, reward=lambda *_: 1.0, tracer=tracer) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
        requests = lab.server.requests
    assert rollout.status == "succeeded", rollout.attempt.error
    triplets = TraceToTriplet().adapt(spans)
    assert [triplet.metadata["agent_name"] for triplet in triplets] == [AGENT_NAME] * len(requests), tracer
    assert all(triplet.response["token_ids"] and triplet.response["logprobs"] for triplet in triplets)
    assert [triplet.reward for triplet in triplets] == [None] * (len(triplets) - 1) + [1.0], tracer
    return any(map(semconv.is_tool_call, spans)), any(request.body.get("stream") for request in requests)


def describe(tools: Mapping[str, bool], *, is_streamed: bool) -> dict[str, str]:
    """Returns what the table says of a framework whose tools are recorded by these tracers."""
    by = ", ".join(f"`{tracer}`" for tracer, are_recorded in tools.items() if are_recorded)
    return {"tool runs are recorded by": by or "no tracer", "calls": "streamed" if is_streamed else "whole"}
