"""Objects of frameworks that are passed to the trainer directly; runners are separate processes."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, answer, ask, is_tool_span, read_sum
from agentlightning_integrations import openai as plugin
from agentlightning_integrations import openai_agents as openai_agents_plugin
from agentlightning_integrations.shared import hooks
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.algorithms.prompt_lab import Server
from tests.integrations.framework_agent import AGENTS, make_langchain_agent, make_openai_agents_agent

pytestmark = pytest.mark.environment("main")  # needs all frameworks

PROMPT = f"{AGENT_NAME}.instructions"


async def read(store: agl.LightningStore) -> tuple[list[agl.Rollout], list[agl.Span]]:
    return list((await store.query_rollouts()).items), list((await store.query_spans(None)).items)


async def test_an_object_can_be_passed_to_fit_with_a_reward() -> None:
    store = agl.create_store("memory://")
    async with ScriptedOpenAI(answer) as server:
        trainer = agl.Trainer(
            algorithm="baseline",
            store=store,
            trackers=[],
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )
        tasks = [ask(i, i) for i in range(1, 5)]
        run = await asyncio.to_thread(trainer.fit, make_openai_agents_agent(), tasks[:3], tasks[3:], reward=read_sum)
    rollouts, spans = await read(store)
    assert run.status == "succeeded"
    assert sorted(rollout.input for rollout in rollouts) == tasks
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 4
    by_rollout = [[span for span in spans if span.rollout_id == rollout.rollout_id] for rollout in rollouts]
    assert [agl.find_final_reward(found) for found in by_rollout] == [1.0] * 4
    assert all(len(list(filter(is_tool_span, found))) == 1 for found in by_rollout)
    await store.close()


async def test_initial_resources_include_the_tunable_texts_of_the_object() -> None:
    class Polite(agl.Algorithm):
        """Publishes the initial prompt and a polite version of it."""

        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            store, given = self.context.store, dict(self.context.initial_resources or {})
            for text in (given[PROMPT].template, "Please: " + given[PROMPT].template):
                await store.add_resources({**given, PROMPT: text})
                rollout = await store.enqueue_rollout(ask(2, 3))
                await store.wait_for_rollouts([rollout.rollout_id])

    store = agl.create_store("memory://")
    async with ScriptedOpenAI(answer) as server:
        trainer = agl.Trainer(
            algorithm=Polite(),
            store=store,
            strategy="shm",
            trackers=[],
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )
        agent = agl.wrap(make_openai_agents_agent(), reward=read_sum, prompts=[PROMPT])
        await asyncio.to_thread(trainer.fit, agent)
        systems = [request.body["messages"][0]["content"] for request in server.requests]
    assert systems == [INSTRUCTIONS] * 2 + ["Please: " + INSTRUCTIONS] * 2
    await store.close()


SCRIPT = """
import importlib, json, os, sys

import agentlightning as agl
import cloudpickle
from agent_framework import Agent as ChatAgent
from agent_framework.openai import OpenAIChatClient
from agents import Agent, function_tool
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from crewai import LLM, Agent as CrewAgent
from crewai.tools import tool
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

NOWHERE = "http://127.0.0.1:9/v1"
LIBRARIES = {
    "agent-framework": "agent_framework", "autogen": "autogen_agentchat", "crewai": "crewai",
    "langchain": "langchain_core", "openai": "openai", "openai-agents": "agents",
}

def add(a: int, b: int) -> int:
    "Adds two numbers."
    return a + b

def is_right(task, output, rollout):
    a, b = [int(word.strip("?")) for word in task.split() if word.strip("?").isdigit()]
    return float(f"sum is {a + b}" in str(output))

openai_model = OpenAIChatCompletionClient(model="gpt-4o", api_key="any", base_url=NOWHERE)
crewai_model = LLM("gpt-4o", api_key="any")
AGENTS = {
    "agent-framework": ChatAgent(OpenAIChatClient("gpt-5", api_key="any"), "Add.", name="mine", tools=[add]),
    "autogen": AssistantAgent("mine", openai_model, tools=[add], system_message="Add.", max_tool_iterations=2),
    "crewai": CrewAgent(role="mine", goal="Add.", backstory="Add.", llm=crewai_model, tools=[tool(add)]),
    "langchain": create_agent(ChatOpenAI(model="gpt-5", api_key="any"), [add], system_prompt="Add.", name="mine"),
    "openai": AsyncOpenAI(base_url=NOWHERE, api_key="any"),
    "openai-agents": Agent(name="mine", instructions="Add.", tools=[function_tool(add)]),
}

class ByFramework(agl.LitAgent):
    "Runs the agent of the framework that the task names. A runner imports each framework for its first task."

    def __init__(self, agents):
        self.home = os.getpid()
        self.pickled = {name: cloudpickle.dumps(agl.wrap(agent, reward=is_right)) for name, agent in agents.items()}
        self.loaded = {}

    def __setstate__(self, state):
        vars(self).update(state)
        if os.getpid() != self.home:  # as in a script that sets a provider before it trains
            self.users = TracerProvider()
            trace.set_tracer_provider(self.users)
            self.early = [name for name in LIBRARIES.values() if name in sys.modules]

    async def rollout_async(self, task, resources, rollout):
        name = task["framework"]
        if name not in self.loaded:
            importlib.import_module(LIBRARIES[name])
            self.loaded[name] = cloudpickle.loads(self.pickled[name])
        reward = await self.loaded[name].rollout_async(task["question"], resources, rollout)
        seen = {"early": self.early, "keeps": trace.get_tracer_provider() is self.users}
        if name == "crewai":
            from crewai.telemetry import Telemetry
            seen["reports"] = Telemetry()._should_execute_telemetry()
        agl.emit_message(json.dumps(seen))
        return reward
"""
"""Objects, tools and reward function of ``__main__``, which the runner process does not import."""


def call_tool_if_there(request: RecordedRequest) -> Answer:
    """Answers like the kit's calculator; without a tool, as for the bare client, the answer is the sum."""
    if request.body.get("tools"):
        return answer(request)
    a, b = re.findall(r"\d+", request.body["messages"][-1]["content"])
    return Answer(f"The sum is {int(a) + int(b)}.")


@pytest.fixture(scope="module")
def traces_of_a_script() -> dict[str, list[tuple[agl.AttemptedRollout, list[agl.Span]]]]:
    """Returns rollouts and spans of a run that sends each framework two tasks concurrently, by framework."""
    store = agl.create_store("memory://")
    script: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of crewai's imports
        exec(SCRIPT, script)
    tasks = [{"framework": name, "question": f"What is {a} + {10 * a}?"} for a in (1, 2) for name in AGENTS]
    with Server(call_tool_if_there) as server, pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("CREWAI_")]:
            environment.delenv(name)
        trainer = agl.Trainer(
            algorithm="baseline",
            store=store,
            trackers=[],
            max_concurrency=16,
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )
        trainer.fit(script["ByFramework"](script["AGENTS"]), tasks)
    rollouts, spans = asyncio.run(read(store))
    found: dict[str, Any] = {}
    for rollout in rollouts:
        mine = [span for span in spans if span.rollout_id == rollout.rollout_id]
        found.setdefault(rollout.input["framework"], []).append((rollout, mine))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("framework", AGENTS)
def test_objects_of_a_script_run_in_a_runner_process_and_never_mix(framework: str, traces_of_a_script: Any) -> None:
    assert len(traces_of_a_script[framework]) == 2
    for rollout, spans in traces_of_a_script[framework]:
        assert (rollout.attempt.error, agl.find_final_reward(spans)) == (None, 1.0)
        agents = [triplet.metadata["agent_name"] for triplet in agl.TraceToTriplet().adapt(spans)]
        tools = [span.attributes["gen_ai.tool.call.arguments"] for span in spans if is_tool_span(span)]
        if framework == "openai":  # a client makes one call
            assert (agents, tools) == ([None], [])
            continue
        assert agents == ["mine"] * 2
        (tool,) = tools
        assert list(json.loads(tool).values()) == [*map(int, re.findall(r"\d+", rollout.input["question"]))]


@pytest.mark.slow
def test_a_framework_that_is_imported_after_the_tracer_is_traced_and_keeps_the_global_provider(
    traces_of_a_script: Any,
) -> None:
    """The test above shows that it is traced. CrewAI's telemetry, which would stay active, is not even started."""
    bodies = [span.attributes.get(agl.semconv.MESSAGE_BODY) for found in traces_of_a_script.values()
              for _, spans in found for span in spans]  # fmt: skip
    seen = [json.loads(body) for body in bodies if body]
    assert len(seen) == 2 * len(AGENTS)
    assert all((each["early"], each["keeps"]) == ([], True) for each in seen)
    assert [each["reports"] for each in seen if "reports" in each] == [False] * 2


class _Refuses:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def import_module(self, name: str) -> Any:
        raise self._error


def test_wrap_agent_returns_none_for_unknown_objects() -> None:
    class Stranger: ...

    assert get_manager().hook.wrap_agent(agent=Stranger(), options=None) is None
    with pytest.raises(agl.ConfigError, match="Stranger is not an agent, and no plugin supports its framework"):
        agl.wrap(Stranger())


def test_a_callable_object_of_a_package_is_refused_because_it_would_use_its_own_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object of the user's own, and one whose call gets the model of the rollout, are agents."""
    source = """
class Agent:
    def __call__(self, prompt, **options): ...

class Aware:
    def __call__(self, task, llm): ...
"""
    for folder, name in (("site-packages", "installed_framework"), ("project", "own_framework")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    installed, own = importlib.import_module("installed_framework"), importlib.import_module("own_framework")

    class Subclass(installed.Agent): ...

    for refused in (installed.Agent(), Subclass()):
        with pytest.raises(
            agl.ConfigError, match=r"it would call its own endpoint with its own key.*docs/integrations.md"
        ):
            agl.wrap(refused)
    for accepted in (installed.Aware(), own.Agent(), installed.Agent().__call__, functools.lru_cache(own.Agent())):
        agl.wrap(accepted)


def test_the_error_about_a_missing_dependency_of_a_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "importlib", _Refuses(ImportError("No module named 'langchain_openai'")))
    with pytest.raises(agl.PluginError, match=r"No module named 'langchain_openai'.*pip install .*\[langchain\]'"):
        agl.wrap(make_langchain_agent())


def test_an_integration_that_fails_to_instrument_does_not_break_the_import(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "importlib", _Refuses(RuntimeError("no luck")))
    undo = plugin.instrument(object())
    assert undo is not None
    undo()
    assert "openai is not traced: RuntimeError: no luck" in caplog.text


def test_a_users_package_with_the_name_of_a_framework_is_not_mistaken_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Writer:
        def __call__(self, task: str) -> float:
            return 1.0

    Writer.__module__ = "agents"  # the name of the Agents SDK
    package: Any = ModuleType("agents")
    package.Writer = Writer
    monkeypatch.setitem(sys.modules, "agents", package)
    undo = openai_agents_plugin.instrument(object())
    assert undo is not None
    undo()
    assert "is not traced" not in caplog.text
    assert isinstance(agl.wrap(Writer()), agl.LitAgent)
