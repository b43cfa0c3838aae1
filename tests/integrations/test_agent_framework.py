from __future__ import annotations

from typing import Any, Never

import agent_framework.observability as observability_module
import pytest
from agent_framework import (
    Agent,
    AgentExecutorResponse,
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
from agentlightning.testing.agent import (
    AGENT_NAME,
    MODEL,
    TEMPERATURE,
    AgentConformance,
    Lab,
    answer,
    ask,
    is_tool_span,
)
from agentlightning_integrations.agent_framework import agent as our_integration
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.integrations.framework_agent import NOWHERE, PROMPTS, make_agent_framework_agent
from tests.integrations.team import THE_END, WRITER, TeamTests, names_and_texts, run

pytestmark = pytest.mark.environment("main")  # tests/newest has a few of these


class TestAgentFramework(AgentConformance):
    prompt_path = PROMPTS["agent-framework"]

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
    """Answers for a calculator, a writer, and a leader that calls the calculator."""
    messages = request.body["messages"]
    system, last = messages[0]["content"], messages[-1]
    if "writ" in system.lower():
        return Answer(THE_END)
    if "lead" in system.lower() and last["role"] == "user":
        return Answer(tool_calls=[(AGENT_NAME, {"task": ask(2, 3)})])
    return answer(request)


class TestAWorkflow(TeamTests):
    given, said = "gen_ai.input.messages", "gen_ai.output.messages"

    @pytest.fixture
    def team(self) -> Any:
        return make_workflow()

    def last_words(self, output: Any) -> str:
        return THE_END if THE_END.upper() in output.get_outputs() else ""


async def test_texts_of_the_agents_of_a_workflow_can_be_tuned() -> None:
    lab = Lab(make_workflow(), script, prompts={"writer.instructions": "write_style"})
    rollout, _ = await run(lab, resources={"write_style": "You write rhymes."})
    assert rollout.attempt.error is None
    assert lab.server.requests[-1].body["messages"][0]["content"] == "You write rhymes."
    assert "rhymes" not in str(lab.server.requests[0].body)


async def test_agents_that_are_tools_or_are_called_by_an_executor_call_the_rollouts_endpoint() -> None:
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
    assert names_and_texts(spans) == [("writer", THE_END)]


async def test_a_workflow_converted_to_an_agent_can_be_wrapped() -> None:
    lab = Lab(make_workflow().as_agent("flow"), script, prompts=["writer.instructions"])
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert names_and_texts(spans)[-1] == ("writer", THE_END)


async def test_a_workflow_that_cannot_be_copied_is_refused_with_an_alternative() -> None:
    class Desk(Executor):
        def __init__(self) -> None:
            super().__init__(id="desk")
            self.rest = (task for task in ())  # a generator

        @handler
        async def work(self, task: str, ctx: WorkflowContext[Never, str]) -> None:
            await ctx.yield_output(task)

    rollout, _ = await run(Lab(WorkflowBuilder(start_executor=Desk(), name="office").build()))
    assert rollout.attempt.error is not None
    assert "'office' cannot be copied" in rollout.attempt.error.message


async def test_contents_are_recorded_only_inside_attempts_and_undo_restores_the_setting() -> None:
    own = vars(ObservabilitySettings)["enable_sensitive_data"]
    get_tracer = observability_module.get_tracer
    undo = our_integration.instrument(TracerProvider())
    outside = OBSERVABILITY_SETTINGS.enable_sensitive_data
    async with agl.OtelTracer().trace_context():
        inside = OBSERVABILITY_SETTINGS.enable_sensitive_data and OBSERVABILITY_SETTINGS.enable_instrumentation
    assert (outside, inside) == (False, True), "outside of attempts, the user's own setting applies"
    undo()
    assert vars(ObservabilitySettings)["enable_sensitive_data"] is own
    assert observability_module.get_tracer is get_tracer


async def test_a_function_tool_may_contain_an_agent_and_other_variables_in_its_closure() -> None:
    def make_tool() -> Any:
        writer, calls = make_writer(), 0

        async def ask_writer(question: str) -> str:
            """Asks the writer."""
            nonlocal calls
            calls += 1
            if calls < 0:
                return str(unset)
            return (await writer.run(question)).text

        if calls:
            unset = ""  # never assigned, so the cell of this variable stays empty
        return ask_writer

    tool = make_tool()
    model = OpenAIChatClient("gpt-5", api_key="any", base_url=NOWHERE)
    leader = Agent(model, "You lead.", name="leader", tools=[tool])

    def lead(request: RecordedRequest) -> Answer:
        messages = request.body["messages"]
        if messages[0]["content"] == WRITER or messages[-1]["role"] == "tool":
            return Answer(THE_END)
        return Answer(tool_calls=[("ask_writer", {"question": "hello"})])

    async with Lab(leader, lead, reward=lambda *_: 1.0) as lab:
        rollouts = await lab.run("one", "two")
        assert [rollout.attempt.error for rollout in rollouts] == [None, None]
        assert {request.body["model"] for request in lab.server.requests} == {MODEL}
    variables = dict(zip(tool.__code__.co_freevars, tool.__closure__, strict=True))
    assert variables["calls"].cell_contents == 2  # rollouts share variables that are not agents


def test_different_texts_of_agents_with_the_same_name_cannot_be_tuned() -> None:
    model = OpenAIChatClient("gpt-5", api_key="any", base_url=NOWHERE)
    leader = Agent(model, "You lead.", name=AGENT_NAME, tools=[make_agent_framework_agent().as_tool()])
    with pytest.raises(agl.ConfigError, match=rf"different texts at '{AGENT_NAME}\.instructions'"):
        agl.wrap(leader, prompts=[f"{AGENT_NAME}.instructions"])


def test_a_text_cannot_be_tuned_if_another_agent_of_the_same_name_has_no_text() -> None:
    model = OpenAIChatClient("gpt-5", api_key="any", base_url=NOWHERE)
    silent = Agent(model, name=AGENT_NAME, description="adds")
    leader = Agent(model, "You lead.", name=AGENT_NAME, tools=[silent.as_tool()])
    for label in ("instructions", "description"):
        with pytest.raises(agl.ConfigError, match=rf"different texts at '{AGENT_NAME}\.{label}'"):
            agl.wrap(leader, prompts=[f"{AGENT_NAME}.{label}"])
