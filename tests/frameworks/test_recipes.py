"""The pages of docs/integrations on the real packages of the frameworks that the other environments lack."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_integrations.shared.agent import FrameworkAgent
from tests.recipes import FRAMEWORKS, WITH_NODE, check
from tests.source import REPO

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks and their dependencies


@pytest.fixture(autouse=True)
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collects clients that a framework left open while their warnings are ignored."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    yield
    gc.collect()


def enter_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a folder with the libraries and programs of npm."""
    subprocess.run([sys.executable, REPO / ".ci" / "environments.py", "npm"], check=True, stdout=subprocess.DEVNULL)
    modules = REPO / ".venvs" / "npm" / "node_modules"
    (folder / "node_modules").symlink_to(modules)
    monkeypatch.setenv("PATH", f"{modules / '.bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_the_agent_of_a_page_gives_a_triplet_with_tokens_for_each_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in WITH_NODE:
        enter_node(tmp_path, monkeypatch)
    await check(name, tmp_path)


def make(module: str, cls: str, /, **settings: Any) -> Any:
    return getattr(importlib.import_module(module), cls)(**settings)


def make_smolagents() -> Any:
    return make("smolagents", "ToolCallingAgent", tools=[], model=make("smolagents", "OpenAIModel", model_id="m"))


def make_haystack() -> Any:
    secret = importlib.import_module("haystack.utils").Secret.from_token("own")
    generator = make("haystack.components.generators.chat", "OpenAIChatGenerator", api_key=secret)
    return make("haystack.components.agents", "Agent", chat_generator=generator)


def make_llama_index() -> Any:
    model = make("llama_index.llms.openai_like", "OpenAILike", model="m", is_function_calling_model=True)
    return make("llama_index.core.agent.workflow", "FunctionAgent", llm=model, tools=[])


OBJECTS: dict[str, Callable[[], Any]] = {
    "agno": lambda: make("agno.agent", "Agent"),
    "haystack": make_haystack,
    "llama-index": make_llama_index,
    "smolagents": make_smolagents,
}


@pytest.mark.parametrize("framework", OBJECTS)
async def test_an_object_that_would_call_its_own_endpoint_is_refused_with_what_to_write(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "own")
    made = OBJECTS[framework]()
    trainer = agl.Trainer(
        algorithm="baseline", trackers=[], initial_resources={"llm": agl.LLM(endpoint="http://x", model="m")}
    )
    for use in (agl.wrap, lambda each: trainer.fit(each, ["a"]), lambda each: agl.evaluate(each, ["a"])):
        with pytest.raises(agl.ConfigError, match=r"is not an agent.*def agent\(task, llm: agl.LLM\).*integrations.md"):
            use(made)


def test_an_object_of_deep_agents_is_taken_as_it_is() -> None:
    model = make("langchain_openai", "ChatOpenAI", model="m", api_key="own")
    graph = importlib.import_module("deepagents").create_deep_agent(model=model, name="calculator")
    assert isinstance(agl.wrap(graph, reward=lambda *_: 1.0).agent, FrameworkAgent)
