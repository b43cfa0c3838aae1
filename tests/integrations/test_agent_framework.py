from __future__ import annotations

import asyncio
import threading
from typing import Any, Never

import agent_framework.observability as observability_module
import pytest
from agent_framework import (
    Agent,
    AgentExecutorResponse,
    AgentResponse,
    Executor,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    executor,
    handler,
)
from agent_framework.observability import OBSERVABILITY_SETTINGS, ObservabilitySettings
from agent_framework.openai import OpenAIChatClient
from opentelemetry.sdk.trace import TracerProvider

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, MODEL, AgentConformance, Lab, answer, ask
from agentlightning.testing.agent.conformance import is_tool_span
from agentlightning.testing.agent.lab import TEMPERATURE
from agentlightning.testing.openai_server import Answer, RecordedRequest
from agentlightning_integrations import agent_framework as our_integration
from tests.integrations.framework_agent import NOWHERE, make_agent_framework_agent

pytestmark = pytest.mark.environment("main", "newest")
WRITER = "You write what the calculator found."


class TestAgentFramework(AgentConformance):
    prompt_path = f"{AGENT_NAME}.instructions"

    @pytest.fixture
    def agent(self) -> Any:
        return make_agent_framework_agent()


def make_writer() -> Agent[Any]:
    return Agent(OpenAIChatClient("gpt-5", api_key="any", base_url=NOWHERE), WRITER, name="writer")


@executor(id="shout")
async def shout(response: AgentExecutorResponse, ctx: WorkflowContext[Never, str]) -> None:
    await ctx.yield_output(response.agent_response.text.upper())


def make_workflow() -> Workflow:
    calculator, writer = make_agent_framework_agent(), make_writer()
    return WorkflowBuilder(start_executor=calculator).add_edge(calculator, writer).add_edge(writer, shout).build()


def script(request: RecordedRequest) -> Answer:
    """The kit's calculator, a writer, and a leader who calls the calculator."""
    messages = request.body["messages"]
    system, last = messages[0]["content"], messages[-1]
    if "writ" in system.lower():
        return Answer("the end")
    if "lead" in system.lower() and last["role"] == "user":
        return Answer(tool_calls=[(AGENT_NAME, {"task": ask(2, 3)})])
    return answer(request)


def names_and_texts(spans: list[agl.Span]) -> list[tuple[str | None, str]]:
    triplets = agl.TraceToTriplet().adapt(spans)
    return [(t.metadata["agent_name"], t.response["raw_content"][0]["content"] or "a tool call") for t in triplets]


async def run(lab: Lab, **more: Any) -> tuple[agl.AttemptedRollout, list[agl.Span]]:
    async with lab:
        (rollout,) = await lab.run(ask(2, 3), **more)
        return rollout, await lab.spans(rollout)


async def test_each_agent_of_a_workflow_has_its_own_triplets() -> None:
    lab = Lab(make_workflow(), script, reward=lambda task, output, rollout: float("THE END" in output.get_outputs()))
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert names_and_texts(spans) == [
        (AGENT_NAME, "a tool call"),
        (AGENT_NAME, "The sum is 5."),
        ("writer", "the end"),
    ]
    assert agl.find_final_reward(spans) == 1.0
    assert len(agl.TraceToTriplet(agent_match="^writer$").adapt(spans)) == 1
    said = {span.attributes["gen_ai.agent.name"]: span for span in spans if span.name.startswith("invoke_agent")}
    assert "The sum is 5." in said["writer"].attributes["gen_ai.input.messages"]
    assert "the end" in said["writer"].attributes["gen_ai.output.messages"]


async def test_texts_of_the_agents_of_a_workflow_can_be_tuned() -> None:
    lab = Lab(make_workflow(), script, prompts={"writer.instructions": "write_style"})
    rollout, _ = await run(lab, resources={"write_style": "You write rhymes."})
    assert rollout.attempt.error is None
    assert lab.server.requests[-1].body["messages"][0]["content"] == "You write rhymes."
    assert "rhymes" not in str(lab.server.requests[0].body)


async def test_a_workflow_runs_eight_times_at_once_from_its_beginning_each_time() -> None:
    lab = Lab(make_workflow(), script, reward=lambda task, output, rollout: float("THE END" in output.get_outputs()))
    async with lab:
        rollouts = await lab.run(*(ask(i, i) for i in range(8)))
        for i, rollout in enumerate(rollouts):
            spans = await lab.spans(rollout)
            assert agl.find_final_reward(spans) == 1.0
            assert names_and_texts(spans)[1] == (AGENT_NAME, f"The sum is {2 * i}.")


async def test_an_agent_that_is_a_tool_and_one_in_an_executor_of_the_user_call_the_rollouts_endpoint() -> None:
    leader = Agent(
        OpenAIChatClient("gpt-5", api_key="any", base_url=NOWHERE),
        "You lead.",
        name="leader",
        tools=[make_agent_framework_agent().as_tool()],
        default_options={"temperature": 0.1},
    )
    lab = Lab(leader, script, prompts=[f"{AGENT_NAME}.instructions"])
    rollout, spans = await run(lab, resources={f"{AGENT_NAME}.instructions": "Add with the tool."})
    assert rollout.attempt.error is None
    assert [name for name, _ in names_and_texts(spans)] == ["leader", AGENT_NAME, AGENT_NAME, "leader"]
    assert [span.attributes["gen_ai.tool.name"] for span in spans if is_tool_span(span)] == ["add", AGENT_NAME]
    assert {(r.body["model"], r.body["temperature"]) for r in lab.server.requests} == {(MODEL, TEMPERATURE)}
    assert lab.server.requests[1].body["messages"][0]["content"] == "Add with the tool."

    class Desk(Executor):
        def __init__(self) -> None:
            super().__init__(id="desk")
            self.staff = {"writer": make_writer()}

        @handler
        async def work(self, task: str, ctx: WorkflowContext[Never, str]) -> None:
            await ctx.yield_output((await self.staff["writer"].run(task)).text)

    rollout, spans = await run(Lab(WorkflowBuilder(start_executor=Desk()).build(), script))
    assert rollout.attempt.error is None
    assert names_and_texts(spans) == [("writer", "the end")]


async def test_a_workflow_as_an_agent_is_an_agent() -> None:
    lab = Lab(make_workflow().as_agent("flow"), script, prompts=["writer.instructions"])
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert names_and_texts(spans)[-1] == ("writer", "the end")


async def test_a_task_may_be_anything_that_is_json() -> None:
    def reward(task: Any, output: AgentResponse[Any], rollout: agl.Rollout) -> float:
        return float(output.text == "The sum is 5.")

    async with Lab(make_agent_framework_agent(), reward=reward) as lab:
        (rollout,) = await lab.run({"question": ask(2, 3)})  # type: ignore[arg-type] # tasks are often mappings
        assert agl.find_final_reward(await lab.spans(rollout)) == 1.0
        assert lab.server.requests[0].body["messages"][1]["content"] == '{"question": "What is 2 + 3?"}'


async def test_an_error_inside_a_workflow_fails_the_attempt_and_says_what_it_was() -> None:
    rollout, _ = await run(Lab(make_workflow(), [Answer(status=400, error="the model has gone home")]))
    assert rollout.status == "failed"
    assert rollout.attempt.error is not None
    assert "the model has gone home" in rollout.attempt.error.message
    assert "Traceback" in rollout.attempt.error.traceback


@pytest.mark.parametrize("by", ["timeout", "cancellation"])
async def test_a_workflow_stops_at_once(by: str) -> None:
    called = asyncio.Event()

    def slowly(request: RecordedRequest) -> Answer:
        called.set()
        return Answer("nothing yet", delay_s=0.7)

    async with Lab(make_workflow(), slowly) as lab:

        async def cancel(ids: list[str]) -> None:
            await asyncio.wait_for(called.wait(), 60)
            await lab.store.cancel_rollout(ids[0])

        if by == "timeout":
            (rollout,) = await lab.run(ask(2, 3), timeout_s=0.5)
            assert rollout.attempt.status == "timeout"
        else:
            (rollout,) = await lab.run(ask(2, 3), meanwhile=cancel)
            assert rollout.status == "cancelled"
        asked = len(lab.server.requests)
        await asyncio.sleep(1.5)
        assert len(lab.server.requests) == asked <= 1


async def test_a_workflow_that_cannot_be_copied_is_refused_with_the_way_out() -> None:
    class Desk(Executor):
        def __init__(self) -> None:
            super().__init__(id="desk")
            self.lock = threading.Lock()

        @handler
        async def work(self, task: str, ctx: WorkflowContext[Never, str]) -> None:
            await ctx.yield_output(task)

    rollout, _ = await run(Lab(WorkflowBuilder(start_executor=Desk(), name="office").build()))
    assert rollout.attempt.error is not None
    assert "'office' cannot be copied" in rollout.attempt.error.message


async def test_contents_are_recorded_inside_attempts_only_and_undo_leaves_no_trace() -> None:
    own = vars(ObservabilitySettings)["enable_sensitive_data"]
    get_tracer = observability_module.get_tracer
    undo = our_integration.instrument(TracerProvider())
    outside = OBSERVABILITY_SETTINGS.enable_sensitive_data
    async with agl.OtelTracer().trace_context():
        inside = OBSERVABILITY_SETTINGS.enable_sensitive_data and OBSERVABILITY_SETTINGS.enable_instrumentation
    assert (outside, inside) == (False, True), "what a user's own exporters get stays the user's choice"
    undo()
    assert vars(ObservabilitySettings)["enable_sensitive_data"] is own
    assert observability_module.get_tracer is get_tracer
