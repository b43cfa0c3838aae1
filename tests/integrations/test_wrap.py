"""A framework's own object, given to the trainer as it is; runners are processes of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.plugins import get_manager
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, answer, ask, read_sum
from agentlightning.testing.agent.conformance import is_tool_span
from agentlightning.testing.openai_server import ScriptedOpenAI
from agentlightning_integrations import plugin
from tests.integrations.framework_agent import AGENTS, make_langchain_agent, make_openai_agents_agent

PROMPT = f"{AGENT_NAME}.instructions"


async def read(store: agl.LightningStore) -> tuple[list[agl.Rollout], list[agl.Span]]:
    return list((await store.query_rollouts()).items), list((await store.query_spans(None)).items)


async def test_an_object_goes_straight_into_fit_with_its_reward() -> None:
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


class ByFramework(agl.LitAgent[Any]):
    """Runs the agent of the framework that the task names."""

    def __init__(self, agents: dict[str, agl.LitAgent[Any]]) -> None:
        self._agents = agents

    async def rollout_async(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> Any:
        agent = self._agents[task["framework"]]
        if agent.is_async():
            return await agent.rollout_async(task["question"], resources, rollout)
        return await asyncio.to_thread(agent.rollout, task["question"], resources, rollout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # crewai reads its own deprecated fields
async def test_objects_of_all_frameworks_at_once_in_a_runner_process_never_mix() -> None:
    store = agl.create_store("memory://")
    agents = {name: agl.wrap(make(), reward=read_sum) for name, make in AGENTS.items()}
    async with ScriptedOpenAI(answer) as server:
        trainer = agl.Trainer(
            algorithm="baseline",
            store=store,
            trackers=[],
            max_concurrency=8,
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )
        tasks = [{"framework": name, "question": ask(i, i)} for i in (1, 2) for name in AGENTS]
        await asyncio.to_thread(trainer.fit, ByFramework(agents), tasks)
    rollouts, spans = await read(store)
    errors = [r.attempt.error for r in rollouts if isinstance(r, agl.AttemptedRollout) and r.attempt.error]
    assert errors == []
    assert len(rollouts) == len(tasks)
    for rollout in rollouts:
        found = [span for span in spans if span.rollout_id == rollout.rollout_id]
        assert agl.find_final_reward(found) == 1.0
        if rollout.input["framework"] != "openai":  # whose agent is a function, and runs its tools itself
            (tool,) = filter(is_tool_span, found)
            asked = set(json.loads(tool.attributes["gen_ai.tool.call.arguments"]).values())
            assert asked == {int(rollout.input["question"].split()[2])}
    await store.close()


async def test_the_trainer_begins_with_the_texts_of_the_object() -> None:
    class Polite(agl.Algorithm):
        """Publishes what it was given, made polite."""

        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            store, given = self.context.store, dict(self.context.initial_resources or {})
            for text in (given[PROMPT].template, "Please: " + given[PROMPT].template):  # type: ignore[attr-defined] # a prompt
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
    import agentlightning as agl
    {imports}

    def is_right(task, output, rollout):
        return float("sum is 5" in str(output))

    {make}
    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm="baseline", store=store, trackers=[],
        initial_resources={{"llm": agl.LLM(endpoint={endpoint!r}, model="m")}},
    )
    trainer.fit(agent, ["What is 2 + 3?"], reward=is_right)

    async def report():
        (rollout,) = (await store.query_rollouts()).items
        spans = (await store.query_spans(rollout.rollout_id)).items
        print(rollout.attempt.error)
        print(agl.find_final_reward(spans), [t.metadata["agent_name"] for t in agl.TraceToTriplet().adapt(spans)])

    import asyncio
    asyncio.run(report())
"""
SCRIPTS = {
    "agent-framework": (
        "from agent_framework import Agent\n    from agent_framework.openai import OpenAIChatClient",
        """
    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    agent = Agent(OpenAIChatClient("gpt-5", api_key="any"), "Add.", name="mine", tools=[add])
    """,
    ),
    "autogen": (
        "from autogen_agentchat.agents import AssistantAgent\n"
        "    from autogen_ext.models.openai import OpenAIChatCompletionClient",
        """
    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    model = OpenAIChatCompletionClient(model="gpt-4o", api_key="any", base_url="http://127.0.0.1:9/v1")
    agent = AssistantAgent("mine", model, tools=[add], system_message="Add.", max_tool_iterations=2)
    """,
    ),
    "crewai": (
        "from crewai import Agent, LLM\n    from crewai.tools import tool",
        """
    @tool
    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    agent = Agent(role="mine", goal="Add.", backstory="You add.", llm=LLM("gpt-4o", api_key="any"), tools=[add])
    """,
    ),
    "langchain": (
        "from langchain.agents import create_agent\n    from langchain_openai import ChatOpenAI",
        """
    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    model = ChatOpenAI(model="gpt-5", api_key="any", base_url="http://127.0.0.1:9/v1")
    agent = create_agent(model, [add], system_prompt="Add.", name="mine")
    """,
    ),
    "openai-agents": (
        "from agents import Agent, function_tool",
        """
    @function_tool
    def add(a: int, b: int) -> int:
        "Adds two numbers."
        return a + b

    agent = Agent(name="mine", instructions="Add.", tools=[add])
    """,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", SCRIPTS)
async def test_a_script_of_one_file_trains_the_agent_that_it_defines(framework: str, tmp_path: Path) -> None:
    """The object, its tools and the reward live in ``__main__``, which runner processes do not import."""
    imports, make = SCRIPTS[framework]
    async with ScriptedOpenAI(answer) as server:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(MAIN.format(imports=imports, make=make, endpoint=server.endpoint)))
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=100
        )
    assert done.stdout.splitlines() == ["None", "1.0 ['mine', 'mine']"], done.stdout + done.stderr


LATE = """
    import asyncio, sys
    from agentlightning.testing.agent import Lab, ask
    from agentlightning.adapter import TraceToTriplet
    from agentlightning.tracer import OtelTracer

    tracer = OtelTracer()
    tracer.init()
    assert {package!r} not in sys.modules
    from tests.integrations.framework_agent import AGENTS

    async def main():
        async with Lab(AGENTS[{framework!r}]()) as lab:
            (rollout,) = await lab.run(ask(2, 3))
            spans = await lab.spans(rollout)
        print([triplet.metadata["agent_name"] for triplet in TraceToTriplet().adapt(spans)])

    asyncio.run(main())
    tracer.teardown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "framework"),
    [
        ("agent_framework", "agent-framework"),
        ("agents", "openai-agents"),
        ("autogen_agentchat", "autogen"),
        ("langchain_core", "langchain"),
    ],
)
def test_a_framework_that_is_imported_after_us_is_traced(package: str, framework: str) -> None:
    code = textwrap.dedent(LATE.format(package=package, framework=framework))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.splitlines() == [f"['{AGENT_NAME}', '{AGENT_NAME}']"], done.stdout + done.stderr


def test_wrap_agent_of_the_plugin_leaves_alone_what_it_does_not_know() -> None:
    class Stranger: ...

    assert get_manager().hook.wrap_agent(agent=Stranger(), options=None) is None
    with pytest.raises(agl.ConfigError, match="is no agent; give a function, a LitAgent"):
        agl.wrap(Stranger())


def test_a_framework_whose_other_half_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(package: str) -> Any:
        raise ImportError("No module named 'langchain_openai'")

    monkeypatch.setattr(plugin, "_load", load)
    with pytest.raises(
        agl.PluginError, match=r"No module named 'langchain_openai'.*pip install 'lightning\[langchain\]'"
    ):
        agl.wrap(make_langchain_agent())


def test_an_integration_that_fails_to_instrument_does_not_break_the_import(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(package: str) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(plugin, "_load", load)
    undo = plugin.instrument(object())
    assert undo is not None
    undo()
    assert "openai is not traced: RuntimeError: no luck" in caplog.text
