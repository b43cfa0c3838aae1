"""The agents of docs/integrations: their programs, and the row of the table of frameworks that a run of each gives."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.testing.agent import AGENT_NAME, Answer, Lab, answer, ask
from agentlightning_plugins.shared.scripted_model.server import RecordedRequest
from tests.pages import blocks, read_page
from tests.source import REPO

PAGES: Final = REPO / "docs" / "integrations"
MAIN: Final = ["agent-framework", "autogen", "crewai", "langchain", "openai", "openai-agents"]
NEWEST: Final = ["pydantic-ai"]
WITH_NODE: Final = ["claude-agent-sdk", "vercel-ai-sdk"]
FRAMEWORKS: Final = [
    *("agno", "deep-agents", "dspy", "google-adk", "haystack", "llamaindex", "smolagents", "strands"),
    *WITH_NODE,
]
"""Pages whose agents run in the environment ``frameworks``."""
TASK: Final = {"question": ask(2, 3), "answer": "5"}


def write_files(name: str, folder: Path) -> None:
    """Writes the files of a page into a folder."""
    for block in blocks(PAGES / f"{name}.md"):
        (folder / block.mark).write_text(block.text, encoding="utf-8")


def load(name: str, folder: Path) -> agl.LitAgent[Any]:
    """Returns the agent of a page, from a file: smolagents reads the source of its tools."""
    write_files(name, folder)
    agent: agl.LitAgent[Any] = runpy.run_path(str(folder / "calculator.py"))["agent"]
    return agent


def answer_any(request: RecordedRequest) -> Answer:
    """Answers as ``answer`` does, in the forms that DSPy and smolagents ask for."""
    text = str(request.body["messages"])
    tools = [tool["function"]["name"] for tool in request.body.get("tools") or ()]
    if "[[ ## next_thought" in text:
        call = ("finish", "{}") if "observation_0" in text else ("add", '{"a": 2, "b": 3}')
        fields = {"next_thought": "Add.", "next_tool_name": call[0], "next_tool_args": call[1]}
        return Answer("\n\n".join(f"[[ ## {field} ## ]]\n{value}" for field, value in fields.items()))
    if "[[ ##" in text:
        fields = {"reasoning": "2 and 3 make 5.", "answer": "The sum is 5."}
        return Answer("\n\n".join(f"[[ ## {field} ## ]]\n{value}" for field, value in fields.items()))
    if "final_answer" in tools and "Observation" in str(request.body["messages"][-1]):
        return Answer(tool_calls=[("final_answer", {"answer": "The sum is 5."})])
    own = answer(request)
    if own.tool_calls and "mcp__own__add" in tools:
        return replace(own, tool_calls=[("mcp__own__add", arguments) for _, arguments in own.tool_calls])
    return own


def read_rows() -> dict[str, dict[str, str]]:
    """Returns the table of frameworks of docs/integrations.md: the row of each page, by column."""
    lines = [line for line in read_page(REPO / "docs" / "integrations.md").splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {}
    for row in rows:
        link = re.fullmatch(r"\[.+\]\(integrations/(.+)\.md\)", row[0])
        assert link, row
        found[link[1]] = dict(zip(head, row, strict=True))
    return found


async def check(name: str, folder: Path) -> None:
    """Runs the agent of a page, checks its training data and compares the page's row with it.

    An object that is passed as it is runs with the default tracer: its integration records it.
    """
    row = read_rows()[name]
    tools, is_streamed = {}, False
    for tracer in ["otel", "openinference"] if row["pass"].startswith("a function") else ["otel"]:
        tools[tracer], is_streamed = await run(name, tracer, folder)
    by = ", ".join(f"`{tracer}`" for tracer, are_recorded in tools.items() if are_recorded)
    expected = {"tool runs are recorded by": by or "no tracer", "calls": "streamed" if is_streamed else "whole"}
    assert {column: row[column] for column in expected} == expected
    package, version = row["tested version"].split()
    if name != "vercel-ai-sdk":
        assert importlib.metadata.version(package).startswith(f"{version}."), package


async def run(name: str, tracer: str, folder: Path) -> tuple[bool, bool]:
    """Runs an agent and checks its training data; returns whether its tools are recorded, and its calls streamed."""
    async with Lab(load(name, folder), answer_any, reward=None, tracer=tracer) as lab:
        (rollout,) = await lab.run(TASK)
        spans = await lab.spans(rollout)
        requests = lab.server.requests
    assert rollout.status == "succeeded", rollout.attempt.error
    triplets = TraceToTriplet().adapt(spans)
    assert [triplet.metadata["agent_name"] for triplet in triplets] == [AGENT_NAME] * len(requests), tracer
    assert len(triplets) > 1, "the model was not called again with the result of the tool"
    assert all(triplet.response["token_ids"] and triplet.response["logprobs"] for triplet in triplets)
    assert [triplet.reward for triplet in triplets] == [None] * (len(triplets) - 1) + [1.0], tracer
    return any(map(semconv.is_tool_call, spans)), any(request.body.get("stream") for request in requests)
