from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    function_tool,
    handoff,
    input_guardrail,
    set_trace_processors,
)
from agents.tracing import Span, Trace, TracingProcessor
from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.adapter import TraceToTriplet
from agentlightning.adapter.call import find_states
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, AgentConformance, Lab, add, ask, is_tool_span
from agentlightning.tracer import OtelTracer
from agentlightning_integrations.openai_agents.agent import _processors
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.integrations.framework_agent import PROMPTS, make_openai_agents_agent

pytestmark = pytest.mark.environment("main", "newest", "oldest")


class TestOpenAIAgents(AgentConformance):
    prompt_path = PROMPTS["openai-agents"]

    @pytest.fixture
    def agent(self) -> Any:
        return make_openai_agents_agent()


@input_guardrail
def check_question(context: Any, agent: Agent[Any], task: Any) -> GuardrailFunctionOutput:
    return GuardrailFunctionOutput(output_info=None, tripwire_triggered="forbidden" in str(task))


def make_team() -> Agent[Any]:
    """Returns a front desk that calls a librarian as a tool and hands over to the calculator."""
    librarian = Agent(name="librarian", instructions="Look it up.")
    calculator = Agent(name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[function_tool(add)])
    return Agent(
        name="desk",
        instructions="Ask the librarian, then hand over.",
        tools=[librarian.as_tool("look_up", "Looks it up.")],
        handoffs=[handoff(calculator)],
        input_guardrails=[check_question],
    )


def script_of_team(request: RecordedRequest) -> Answer:
    """Answers for a desk that asks the librarian and hands over, and for a calculator that adds and answers."""
    messages = request.body["messages"]
    tools = [tool["function"]["name"] for tool in request.body.get("tools") or ()]
    used = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    if not tools:
        return Answer("page 5")
    if "look_up" in tools:
        return Answer(
            tool_calls=[("transfer_to_calculator", {}) if "look_up" in used else ("look_up", {"input": "sums"})]
        )
    return Answer("The sum is 5.") if "add" in used else Answer(tool_calls=[("add", {"a": 2, "b": 3})])


async def test_a_team_gives_the_triplets_of_each_agent_in_order() -> None:
    async with Lab(make_team(), script_of_team) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    assert rollout.attempt.error is None
    triplets = agl.TraceToTriplet().adapt(spans)
    names = ["desk", "librarian", "desk", AGENT_NAME, AGENT_NAME]
    assert [triplet.metadata["agent_name"] for triplet in triplets] == names
    assert [triplet.reward for triplet in triplets] == [None, None, None, None, 1.0]
    assert [span.attributes["gen_ai.tool.name"] for span in spans if is_tool_span(span)] == ["look_up", "add"]
    (over,) = [span for span in spans if span.name == "handoff"]
    assert (over.attributes["input.value"], over.attributes["output.value"]) == ("desk", AGENT_NAME)


async def test_the_instructions_of_every_agent_of_a_team_can_be_tuned() -> None:
    prompts = ["desk.instructions", "librarian.instructions", f"{AGENT_NAME}.instructions"]
    tuned = {path: f"Tuned: {path}" for path in prompts}
    async with Lab(make_team(), script_of_team, prompts=prompts) as lab:
        await lab.run(ask(2, 3), resources=tuned)
        systems = [request.body["messages"][0]["content"] for request in lab.server.requests]
    desk, librarian, calculator = tuned.values()
    assert systems == [desk, librarian, desk, calculator, calculator]
    with pytest.raises(agl.ConfigError, match=r"Its texts: calculator.instructions, desk.instructions, librarian"):
        agl.wrap(make_team(), prompts=["instructions"])


async def test_an_error_that_stops_a_run_of_the_sdk_is_recorded_on_the_attempt() -> None:
    async with Lab(make_team(), script_of_team) as lab:
        (rollout,) = await lab.run("forbidden " + ask(2, 3))
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.type == "InputGuardrailTripwireTriggered"

    def again(request: RecordedRequest) -> Answer:
        return Answer(tool_calls=[("add", {"a": 2, "b": 3})])

    async with Lab(make_openai_agents_agent(), again) as lab:
        (rollout,) = await lab.run(ask(2, 3))
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.type == MaxTurnsExceeded.__name__
    assert "Traceback" in rollout.attempt.error.traceback


@dataclass
class Desk:
    """Data that the tools of a run share."""

    customer: str
    notes: list[str]
    api_key: str
    client: object


@pytest.mark.parametrize("is_streamed", [False, True], ids=["run", "run_streamed"])
async def test_the_context_of_a_run_is_the_state_of_the_agent(is_streamed: bool) -> None:
    @function_tool(name_override="add")
    def note(context: RunContextWrapper[Desk], a: int, b: int) -> str:
        """Adds a note."""
        context.context.notes.append(f"{a} and {b}")
        return "noted"

    async def answer(task: str, llm: agl.LLM) -> float:
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            model = OpenAIChatCompletionsModel(llm.model, client)
            agent = Agent[Desk](name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[note], model=model)
            context = Desk("Ada", [], "sk-secret", object())
            if is_streamed:
                async for _ in Runner.run_streamed(agent, task, context=context).stream_events():
                    pass
            else:
                await Runner.run(agent, task, context=context)
        return 1.0

    async with Lab(answer) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    assert rollout.attempt.error is None
    assert [state.changed for state in find_states(spans)] == [
        {"customer": "Ada", "notes": [], "api_key": "***"},
        {"notes": ["2 and 3"]},
    ]
    first, second = agl.adapter.TraceToTransitions().adapt(spans)
    assert (first.state["notes"], second.state["notes"]) == ([], ["2 and 3"])


async def test_an_error_of_a_tool_is_recorded_on_its_span() -> None:
    @function_tool(name_override="add", failure_error_function=None)
    def broken(a: int, b: int) -> int:
        """Adds."""
        raise LookupError("the tool is down")

    agent = Agent(name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[broken])
    async with Lab(agent) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    (tool,) = [span for span in spans if is_tool_span(span)]
    assert tool.status.status_code == "ERROR"
    assert rollout.attempt.error is not None
    assert "the tool is down" in rollout.attempt.error.message


class Uploads(BackendSpanExporter):
    """The SDK's exporter, which collects items instead of sending them."""

    def __init__(self) -> None:
        super().__init__(api_key="sk-of-the-user")
        self.items: list[Any] = []

    def export(self, items: list[Trace | Span[Any]]) -> None:
        self.items.extend(items)


class Other(TracingProcessor):
    """A processor that the user added."""

    def __init__(self) -> None:
        self.traces = 0

    def on_trace_start(self, trace: Trace) -> None:
        self.traces += 1

    def on_trace_end(self, trace: Trace) -> None: ...

    def on_span_start(self, span: Span[Any]) -> None: ...

    def on_span_end(self, span: Span[Any]) -> None: ...

    def shutdown(self) -> None: ...

    def force_flush(self) -> None: ...


@pytest.fixture
def processors() -> Iterator[tuple[Uploads, Other]]:
    """Sets an uploading processor, as the SDK does by default, and a processor of the user."""
    before = _processors()
    uploads, other = Uploads(), Other()
    batch = BatchTraceProcessor(uploads)
    set_trace_processors([batch, other])
    yield uploads, other
    set_trace_processors(before)
    batch.shutdown()


@pytest.mark.parametrize("tracer", ["otel", "dummy"])
async def test_no_trace_is_uploaded_and_processors_of_the_user_stay(
    processors: tuple[Uploads, Other], tracer: str
) -> None:
    uploads, other = processors
    before = _processors()
    async with Lab(make_openai_agents_agent(), tracer=tracer) as lab:
        (rollout,) = await lab.run(ask(2, 3))
    assert rollout.status == "succeeded"
    for processor in before:
        processor.force_flush()
    assert uploads.items == []
    assert other.traces == int(tracer == "otel")
    assert _processors() == before


async def test_a_processor_added_while_a_tracer_is_in_use_stays_after_teardown(
    processors: tuple[Uploads, Other],
) -> None:
    before = _processors()
    tracer, added = OtelTracer(), Other()
    tracer.init()
    set_trace_processors([*_processors(), added])
    tracer.teardown()
    assert _processors() == [*before, added]


async def test_a_function_that_runs_an_agent_is_traced_as_well() -> None:
    async def calculator(task: str, llm: agl.LLM) -> str:
        from agents import OpenAIChatCompletionsModel
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused") as client:
            model = OpenAIChatCompletionsModel(llm.model, client)
            agent = make_openai_agents_agent().clone(model=model)
            result = await Runner.run(agent, task)
        return str(result.final_output)

    async with Lab(calculator) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    assert [triplet.metadata["agent_name"] for triplet in agl.TraceToTriplet().adapt(spans)] == [AGENT_NAME] * 2


async def test_without_an_endpoint_the_agent_uses_its_own_model() -> None:
    """This is the case when only prompts are tuned."""
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    async with Lab(lambda task: None) as lab, AsyncOpenAI(base_url=lab.server.endpoint, api_key="any") as client:
        agent = make_openai_agents_agent().clone(model=OpenAIChatCompletionsModel("theirs", client))
        wrapped = agl.wrap(agent, reward=lambda *_: 1.0, prompts=[f"{AGENT_NAME}.instructions"])
        rollout = agl.Rollout(rollout_id="ro-1", input="", start_time=0.0)
        tuned = {f"{AGENT_NAME}.instructions": agl.PromptTemplate("Be kind.")}
        results = await asyncio.gather(*(wrapped.rollout_async(ask(2, i), tuned, rollout) for i in range(3)))
        assert results == [1.0] * 3
        asked = {(request.body["model"], request.body["messages"][0]["content"]) for request in lab.server.requests}
    assert asked == {("theirs", "Be kind.")}


@pytest.mark.parametrize("model", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_a_streamed_run_has_a_span_for_its_model_call(model: Any) -> None:
    tracer = OtelTracer()
    tracer.init()
    try:
        async with (
            ScriptedOpenAI([Answer("three")]) as server,
            tracer.trace_context() as trace,
            AsyncOpenAI(base_url=server.endpoint, api_key="any") as client,
        ):
            run = Runner.run_streamed(Agent(name="adder", model=model("m", client)), "1+2?")
            assert [event async for event in run.stream_events()]
            assert run.final_output == "three"
    finally:
        tracer.teardown()
    (triplet,) = TraceToTriplet(agent_match="adder").adapt(trace.spans)
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "1+2?"}]
    assert triplet.response["raw_content"] == [{"role": "assistant", "content": "three"}]


def test_different_instructions_of_agents_with_the_same_name_cannot_be_tuned() -> None:
    translator = Agent(name="helper", instructions="Translate.")
    agent = Agent(name="helper", instructions="Summarise.", handoffs=[translator])
    with pytest.raises(agl.ConfigError, match=r"different texts at 'helper\.instructions'.*its own name"):
        agl.wrap(agent, prompts=["helper.instructions"])
    agl.wrap(agent)


@pytest.mark.parametrize("instructions", [None, lambda context, agent: "Translate."])
def test_instructions_cannot_be_tuned_if_another_agent_of_the_same_name_has_none_or_makes_them_by_code(
    instructions: Any,
) -> None:
    translator = Agent(name="helper", instructions=instructions)
    agent = Agent(name="helper", instructions="Summarise.", handoffs=[translator])
    with pytest.raises(agl.ConfigError, match=r"different texts at 'helper\.instructions'.*or one that code makes"):
        agl.wrap(agent, prompts=["helper.instructions"])
    with pytest.raises(agl.ConfigError, match=r"no text 'helper\.instructions'.*Its texts: none"):
        agl.wrap(translator, prompts=["helper.instructions"])
