"""Objects of frameworks that are passed to the trainer directly; runners are separate processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, answer, ask, read_sum
from agentlightning.testing.agent.conformance import is_tool_span
from agentlightning_integrations.framework import hooks
from agentlightning_integrations.openai import plugin
from agentlightning_integrations.openai_agents import plugin as openai_agents_plugin
from agentlightning_plugins.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
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


MAIN = """
    import asyncio, json, sys, warnings
    warnings.simplefilter("ignore")  # of crewai's imports

    import agentlightning as agl
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

    NOWHERE = "http://127.0.0.1:9/v1"

    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    def is_right(task, output, rollout):
        a, b = [int(word.strip("?")) for word in task.split() if word.strip("?").isdigit()]
        return float(f"sum is {a + b}" in str(output))

    openai_model = OpenAIChatCompletionClient(model="gpt-4o", api_key="any", base_url=NOWHERE)
    crewai_model = LLM("gpt-4o", api_key="any")
    agents = {
        "agent-framework": ChatAgent(OpenAIChatClient("gpt-5", api_key="any"), "Add.", name="mine", tools=[add]),
        "autogen": AssistantAgent("mine", openai_model, tools=[add], system_message="Add.", max_tool_iterations=2),
        "crewai": CrewAgent(role="mine", goal="Add.", backstory="Add.", llm=crewai_model, tools=[tool(add)]),
        "langchain": create_agent(ChatOpenAI(model="gpt-5", api_key="any"), [add], system_prompt="Add.", name="mine"),
        "openai": AsyncOpenAI(base_url=NOWHERE, api_key="any"),
        "openai-agents": Agent(name="mine", instructions="Add.", tools=[function_tool(add)]),
    }

    class ByFramework(agl.LitAgent):
        "Runs the agent of the framework that the task names."

        def __init__(self, agents):
            self.agents = agents

        async def rollout_async(self, task, resources, rollout):
            return await self.agents[task["framework"]].rollout_async(task["question"], resources, rollout)

    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm="baseline", store=store, trackers=[], max_concurrency=16,
        initial_resources={"llm": agl.LLM(endpoint=sys.argv[1], model="m")},
    )
    wrapped = {name: agl.wrap(agent, reward=is_right) for name, agent in agents.items()}
    trainer.fit(ByFramework(wrapped), [
        {"framework": name, "question": f"What is {a} + {10 * a}?"} for a in (1, 2) for name in agents
    ])

    async def report():
        for rollout in (await store.query_rollouts()).items:
            spans = (await store.query_spans(rollout.rollout_id)).items
            print(json.dumps({
                "framework": rollout.input["framework"],
                "error": rollout.attempt.error and rollout.attempt.error.message,
                "reward": agl.find_final_reward(spans),
                "agents": [triplet.metadata["agent_name"] for triplet in agl.TraceToTriplet().adapt(spans)],
                "asked": rollout.input["question"],
                "tools": [span.attributes.get("gen_ai.tool.call.arguments") for span in spans
                          if span.attributes.get("gen_ai.operation.name") == "execute_tool"],
            }))

    asyncio.run(report())
"""


def call_tool_if_there(request: RecordedRequest) -> Answer:
    """Answers like the kit's calculator; without a tool, as for the bare client, the answer is the sum."""
    if request.body.get("tools"):
        return answer(request)
    a, b = re.findall(r"\d+", request.body["messages"][-1]["content"])
    return Answer(f"The sum is {int(a) + int(b)}.")


def run_program(program: str, *arguments: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CREWAI_")}
    code = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=500, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def rollouts_of_a_script() -> list[dict[str, Any]]:
    """Returns the results of a program that concurrently runs two rollouts for the agent of each framework.

    Objects, tools and reward function are in ``__main__``, which the runner process does not import.
    """
    with Server(call_tool_if_there) as server:
        return [json.loads(line) for line in run_program(MAIN, server.endpoint)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", AGENTS)
def test_objects_of_a_script_run_in_a_runner_process_and_never_mix(
    framework: str, rollouts_of_a_script: list[dict[str, Any]]
) -> None:
    mine = [rollout for rollout in rollouts_of_a_script if rollout["framework"] == framework]
    assert len(mine) == 2
    for rollout in mine:
        assert (rollout["error"], rollout["reward"]) == (None, 1.0)
        if framework == "openai":  # a client makes one call
            assert (rollout["agents"], rollout["tools"]) == ([None], [])
            continue
        assert rollout["agents"] == ["mine"] * 2
        (tool,) = rollout["tools"]
        assert list(json.loads(tool).values()) == [int(word) for word in re.findall(r"\d+", rollout["asked"])]


LATE = """
    import asyncio, json, sys, warnings
    warnings.simplefilter("ignore")  # of crewai's imports
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    users = TracerProvider()
    trace.set_tracer_provider(users)

    from agentlightning.testing.agent import Lab, ask
    from agentlightning.testing.agent.conformance import is_tool_span
    from agentlightning.adapter import TraceToTriplet
    from agentlightning.tracer import OtelTracer

    tracer = OtelTracer()
    tracer.init()
    early = [name for name in ("agent_framework", "agents", "autogen_agentchat", "crewai", "langchain_core", "openai")
             if name in sys.modules]
    from tests.integrations.framework_agent import AGENTS

    async def run(make):
        async with Lab(make()) as lab:
            (rollout,) = await lab.run(ask(2, 3))
            spans = await lab.spans(rollout)
        names = [triplet.metadata["agent_name"] for triplet in TraceToTriplet().adapt(spans)]
        return names, sum(map(is_tool_span, spans))

    seen = {name: asyncio.run(run(make)) for name, make in AGENTS.items()}
    from crewai.telemetry import Telemetry
    print(json.dumps({
        "early": early,
        "seen": seen,
        "crewai reports": Telemetry()._should_execute_telemetry(),
        "the user's provider stays": trace.get_tracer_provider() is users,
    }))
    tracer.teardown()
"""


@pytest.fixture(scope="module")
def imported_late() -> dict[str, Any]:
    """Returns spans of frameworks that a process imported after the tracer was ready, and settings of the process."""
    found: dict[str, Any] = json.loads(run_program(LATE)[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", AGENTS)
def test_a_framework_that_is_imported_after_agentlightning_is_traced(
    framework: str, imported_late: dict[str, Any]
) -> None:
    assert imported_late["early"] == []
    name, tools = (
        (None, 0) if framework == "openai" else (AGENT_NAME, 1)
    )  # openai's agent is a function with its own tools
    assert imported_late["seen"][framework] == [[name, name], tools]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_framework_replaces_the_global_provider_and_crewai_telemetry_is_off(imported_late: dict[str, Any]) -> None:
    """Uses a separate process, because CrewAI's telemetry starts once and stays active."""
    assert imported_late["the user's provider stays"] is True
    assert imported_late["crewai reports"] is False


class _Refuses:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def import_module(self, name: str) -> Any:
        raise self._error


def test_wrap_agent_returns_none_for_unknown_objects() -> None:
    class Stranger: ...

    assert get_manager().hook.wrap_agent(agent=Stranger(), options=None) is None
    with pytest.raises(agl.ConfigError, match="is not an agent; give a function, a LitAgent"):
        agl.wrap(Stranger())


def test_the_error_about_a_missing_dependency_of_a_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "importlib", _Refuses(ImportError("No module named 'langchain_openai'")))
    with pytest.raises(
        agl.PluginError, match=r"No module named 'langchain_openai'.*pip install 'lightning\[langchain\]'"
    ):
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
