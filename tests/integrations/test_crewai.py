"""CrewAI takes seconds to import, so everything about it is in this module."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, MODEL, AgentConformance, Lab, answer, ask
from agentlightning.testing.agent.conformance import is_tool_span
from agentlightning.testing.openai_server import Answer, RecordedRequest
from tests.integrations.framework_agent import NOWHERE, make_crewai_agent

if TYPE_CHECKING:
    from crewai import Crew

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # crewai reads its own deprecated fields
]


class TestCrewAI(AgentConformance):
    prompt_path = f"{AGENT_NAME}.backstory"

    @pytest.fixture
    def agent(self) -> Any:
        return make_crewai_agent()


def make_crew(**more: Any) -> Crew:
    calculator = make_crewai_agent()
    from crewai import LLM, Agent, Crew, Task

    model = LLM("gpt-4o", base_url=NOWHERE, api_key="any", max_retries=0)
    writer = Agent(role="writer", goal="Write for {reader}.", backstory="You write.", llm=model)
    adding = Task(description="Answer: {task}", expected_output="a number", agent=calculator)
    writing = Task(description="Write it down.", expected_output="text", agent=writer, name="write")
    return Crew(agents=[calculator, writer], tasks=[adding, writing], **more)


def script(request: RecordedRequest) -> Answer:
    """The kit's calculator, a writer, and one who plans."""
    system = request.body["messages"][0]["content"]
    if "You are writer" in system:
        return Answer("the end")
    return answer(request)


def names_and_texts(spans: list[agl.Span]) -> list[tuple[str | None, str]]:
    triplets = agl.TraceToTriplet().adapt(spans)
    return [(t.metadata["agent_name"], t.response["raw_content"][0]["content"] or "a tool call") for t in triplets]


def task_of(a: int, b: int) -> Any:
    return {"task": ask(a, b), "reader": "children"}


async def run(lab: Lab, task: Any = None, **more: Any) -> tuple[agl.AttemptedRollout, list[agl.Span]]:
    async with lab:
        (rollout,) = await lab.run(task or task_of(2, 3), **more)
        return rollout, await lab.spans(rollout)


async def test_each_agent_of_a_crew_has_its_own_triplets_and_a_tasks_fields_are_the_crews_inputs() -> None:
    lab = Lab(make_crew(), script, reward=lambda task, output, rollout: float(output.raw == "the end"))
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert names_and_texts(spans) == [
        (AGENT_NAME, "a tool call"),
        (AGENT_NAME, "The sum is 5."),
        ("writer", "the end"),
    ]
    assert agl.find_final_reward(spans) == 1.0
    assert len(agl.TraceToTriplet(agent_match="^writer$").adapt(spans)) == 1
    assert "Write for children." in lab.server.requests[-1].body["messages"][0]["content"]
    said = {span.attributes["gen_ai.agent.name"]: span for span in spans if span.name.startswith("invoke_agent")}
    assert said[AGENT_NAME].attributes["output.value"] == "The sum is 5."
    assert "The sum is 5." in said["writer"].attributes["input.value"]


async def test_a_crew_runs_eight_times_at_once_and_never_mixes() -> None:
    lab = Lab(make_crew(), script, reward=lambda task, output, rollout: float(task["task"] in str(output.tasks_output)))
    async with lab:
        rollouts = await lab.run(*(task_of(i, i) for i in range(8)))
        for i, rollout in enumerate(rollouts):
            spans = await lab.spans(rollout)
            assert rollout.attempt.error is None
            assert names_and_texts(spans)[1] == (AGENT_NAME, f"The sum is {2 * i}.")
            assert agl.find_final_reward(spans) == 1.0


async def test_texts_of_agents_and_tasks_of_a_crew_can_be_tuned() -> None:
    crew = make_crew()
    prompts = {"writer.goal": "Amuse {reader}.", "write.description": "style", f"{AGENT_NAME}.role": None}
    lab = Lab(crew, script, prompts=prompts, reward=lambda task, output, rollout: 1.0)
    rollout, _ = await run(lab, resources={"style": "Write {task} as a rhyme."})
    assert rollout.attempt.error is None
    system, user = [message["content"] for message in lab.server.requests[-1].body["messages"][:2]]
    assert "Amuse children." in system
    assert f"Write {ask(2, 3)} as a rhyme." in user
    assert crew.agents[1].goal == "Write for {reader}."
    with pytest.raises(agl.ConfigError, match=r"task_1\.description, task_1\.expected_output, write\.description"):
        agl.wrap(crew, prompts=["task_2.description"])


async def test_every_model_of_a_crew_calls_the_rollouts_endpoint() -> None:
    from crewai import LLM, Process

    model = LLM("gpt-4o", base_url=NOWHERE, api_key="any", max_retries=0)
    crew = make_crew(process=Process.hierarchical, manager_llm=model, chat_llm="gpt-4o")
    lab = Lab(crew, lambda request: Answer("the end"), reward=lambda task, output, rollout: 1.0)
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert {request.body["model"] for request in lab.server.requests} == {MODEL}
    assert {name for name, _ in names_and_texts(spans)} == {"Crew Manager"}
    assert crew.manager_llm is model


async def test_another_providers_model_becomes_one_of_the_endpoint() -> None:
    from crewai import Agent
    from crewai.llms.base_llm import BaseLLM

    class Parrot(BaseLLM):
        def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            raise AssertionError("the user's own model was called")

    agent = Agent(role=AGENT_NAME, goal="g", backstory="b", llm=Parrot(model="parrot", max_tokens=77))
    lab = Lab(agent, [Answer("from the endpoint")], reward=lambda task, output, rollout: float("from" in output.raw))
    rollout, spans = await run(lab, "hello")
    assert rollout.attempt.error is None
    assert agl.find_final_reward(spans) == 1.0
    assert lab.server.requests[0].body["max_tokens"] == 77


async def test_a_tool_that_fails_is_a_failed_span_and_the_agent_goes_on() -> None:
    from crewai.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        raise LookupError("no such number")

    agent = make_crewai_agent()
    agent.tools = [add]
    rollout, spans = await run(Lab(agent), ask(2, 3))
    assert rollout.attempt.error is None
    (span,) = [span for span in spans if is_tool_span(span)]
    assert span.status.status_code == "ERROR"
    assert "no such number" in span.model_dump_json()


@pytest.mark.parametrize("by", ["timeout", "cancellation"])
async def test_a_crew_stops_at_once(by: str) -> None:
    called = asyncio.Event()

    def slowly(request: RecordedRequest) -> Answer:
        called.set()
        return Answer("nothing yet", delay_s=1.5)

    async with Lab(make_crew(), slowly) as lab:

        async def cancel(ids: list[str]) -> None:
            await asyncio.wait_for(called.wait(), 60)
            await lab.store.cancel_rollout(ids[0])

        if by == "timeout":
            (rollout,) = await lab.run(task_of(2, 3), timeout_s=1)
            assert rollout.attempt.status == "timeout"
        else:
            (rollout,) = await lab.run(task_of(2, 3), meanwhile=cancel)
            assert rollout.status == "cancelled"
        await asyncio.sleep(2)
        assert len(lab.server.requests) <= 1


def test_a_flow_is_refused_with_the_way_to_run_one() -> None:
    from crewai import Flow

    class Story(Flow[Any]):
        pass

    with pytest.raises(agl.ConfigError, match=r"@agl\.rollout"):
        agl.wrap(Story())


def test_undo_leaves_the_event_bus_as_it_was() -> None:
    from crewai.events.event_bus import CrewAIEventsBus
    from opentelemetry.sdk.trace import TracerProvider

    from agentlightning_integrations import crewai as crewai_integration

    before = CrewAIEventsBus.emit
    undo = crewai_integration.instrument(TracerProvider())
    assert CrewAIEventsBus.emit is not before
    undo()
    assert CrewAIEventsBus.emit is before


def test_crewai_takes_no_global_provider_sends_no_report_and_is_traced_though_imported_last() -> None:
    """In a process of its own: CrewAI's telemetry begins once and stays."""
    program = """
import asyncio, warnings
warnings.simplefilter("ignore")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
users = TracerProvider()
trace.set_tracer_provider(users)

import agentlightning as agl
tracer = agl.OtelTracer()
tracer.init()

from crewai.telemetry import Telemetry
from agentlightning.testing.agent import Lab, ask
from tests.integrations.framework_agent import make_crewai_agent

async def main():
    async with Lab(make_crewai_agent()) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        assert rollout.attempt.error is None, rollout.attempt.error
        names = {span.name for span in await lab.spans(rollout)}
        assert {"invoke_agent calculator", "execute_tool add"} <= names, names

asyncio.run(main())
assert trace.get_tracer_provider() is users
assert not Telemetry()._should_execute_telemetry()
print("fine")
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CREWAI_")}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.splitlines()[-1:] == ["fine"], done.stdout + done.stderr
