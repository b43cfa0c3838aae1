"""Tests of CrewAI, which are in one module because CrewAI takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, MODEL, AgentConformance, Lab, ask, is_tool_span
from agentlightning_integrations.shared.span_tree import SpanTree
from agentlightning_plugins.shared.scripted_model.server import Answer
from tests.integrations.framework_agent import NOWHERE, PROMPTS, make_crewai_agent
from tests.integrations.team import THE_END, WRITER, TeamTests, names_and_texts, run

if TYPE_CHECKING:
    from crewai import Crew, Flow

pytestmark = [
    pytest.mark.environment("main"),  # needs openai 2
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # crewai reads its own deprecated fields
    pytest.mark.filterwarnings("ignore::ImportWarning"),  # about its own imports, in whichever test comes first
]


class TestCrewAI(AgentConformance):
    prompt_path = PROMPTS["crewai"]

    @pytest.fixture
    def agent(self) -> Any:
        return make_crewai_agent()


def make_crew(**more: Any) -> Crew:
    calculator = make_crewai_agent()
    from crewai import LLM, Agent, Crew, Task

    model = LLM("gpt-4o", base_url=NOWHERE, api_key="any", max_retries=0)
    writer = Agent(role="writer", goal="Write for {reader}.", backstory=WRITER, llm=model)
    adding = Task(description="Answer: {task}", expected_output="a number", agent=calculator)
    writing = Task(description="Write it down.", expected_output="text", agent=writer, name="write")
    return Crew(agents=[calculator, writer], tasks=[adding, writing], **more)


def task_of(a: int, b: int) -> Any:
    return {"task": ask(a, b), "reader": "children"}


class TestACrew(TeamTests):
    @pytest.fixture
    def team(self) -> Any:
        return make_crew()

    def task(self, a: int, b: int) -> Any:
        return task_of(a, b)

    def last_words(self, output: Any) -> str:
        return str(output.raw)


async def test_texts_of_agents_and_tasks_of_a_crew_can_be_tuned() -> None:
    crew = make_crew()
    prompts = {"writer.goal": "Amuse {reader}.", "write.description": "style", f"{AGENT_NAME}.role": None}
    lab = Lab(crew, TestACrew().script, prompts=prompts, reward=lambda task, output, rollout: 1.0)
    rollout, _ = await run(lab, task_of(2, 3), resources={"style": "Write {task} as a rhyme."})
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
    lab = Lab(crew, lambda request: Answer(THE_END), reward=lambda task, output, rollout: 1.0)
    rollout, spans = await run(lab, task_of(2, 3))
    assert rollout.attempt.error is None
    assert {request.body["model"] for request in lab.server.requests} == {MODEL}
    assert {name for name, _ in names_and_texts(spans)} == {"Crew Manager"}
    assert crew.manager_llm is model


def make_parrot() -> Any:
    """Returns a model that calls no API."""
    from crewai.llms.base_llm import BaseLLM

    class Parrot(BaseLLM):
        def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            raise AssertionError("the user's own model was called")

        def get_input_tokens_count(self, *args: Any, **kwargs: Any) -> int:
            raise AssertionError("the user's own model got the prompt")

    return Parrot(model="parrot", max_tokens=77)


async def test_a_model_of_another_provider_is_redirected_to_the_endpoint() -> None:
    from crewai import Agent

    agent = Agent(role=AGENT_NAME, goal="g", backstory="b", llm=make_parrot())
    lab = Lab(agent, [Answer("from the endpoint")], reward=lambda task, output, rollout: float("from" in output.raw))
    rollout, spans = await run(lab, "hello")
    assert rollout.attempt.error is None
    assert agl.find_final_reward(spans) == 1.0
    assert lab.server.requests[0].body["max_tokens"] == 77


async def test_a_failed_tool_is_a_failed_span_and_the_agent_continues() -> None:
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


def make_flow() -> Flow[Any]:
    """Returns a flow with a method that creates and runs an agent, and one that awaits an agent of the flow."""
    calculator = make_crewai_agent
    from crewai import Agent, Flow
    from crewai.flow.flow import listen, start

    class Story(Flow[Any]):
        def __init__(self, **data: Any) -> None:
            super().__init__(**data)
            self.writer = Agent(role="writer", goal="Write.", backstory=WRITER, llm=make_parrot())

        @start()
        def add_up(self) -> str:
            return str(calculator().kickoff(self.state["task"]).raw)

        @listen(add_up)
        async def write(self, result: str) -> str:
            return str((await self.writer.kickoff_async(result)).raw)

    return Story()


class TestAFlow(TeamTests):
    @pytest.fixture
    def team(self) -> Any:
        return make_flow()

    def last_words(self, output: Any) -> str:
        return str(output)

    async def test_a_flow_can_be_sent_to_a_runner_process(self, team: Any) -> None:
        lab = Lab(team, self.script, reward=self.reward)
        lab.agent = cloudpickle.loads(cloudpickle.dumps(lab.agent))
        rollout, spans = await run(lab)
        assert rollout.attempt.error is None
        assert agl.find_final_reward(spans) == 1.0

    def test_a_flow_has_no_tunable_texts(self, team: Any) -> None:
        with pytest.raises(agl.ConfigError, match=r"no text 'writer.backstory'.* Its texts: none"):
            agl.wrap(team, prompts=["writer.backstory"])


async def test_models_are_not_redirected_outside_rollouts_of_flows() -> None:
    await run(Lab(make_flow(), TestAFlow().script, reward=TestAFlow().reward))
    with pytest.raises(AssertionError, match="the user's own model was called"):
        make_parrot().call("hello")


def test_undo_restores_the_event_bus() -> None:
    from crewai.events.event_bus import CrewAIEventsBus
    from opentelemetry.sdk.trace import TracerProvider

    from agentlightning_integrations.crewai import agent as crewai_integration

    before = CrewAIEventsBus.emit
    undo = crewai_integration.instrument(TracerProvider())
    assert CrewAIEventsBus.emit is not before
    undo()
    assert CrewAIEventsBus.emit is before


async def test_rollouts_of_a_crew_that_has_already_run_begin_with_its_templates() -> None:
    crew = make_crew()
    async with Lab(crew, TestACrew().script, reward=lambda *_: 1.0) as lab:
        own = [make_llm(lab.server.endpoint) for _ in crew.agents]
        for agent, model in zip(crew.agents, own, strict=True):
            agent.llm = model
        await crew.akickoff(inputs={"task": ask(7, 8), "reader": "sailors"})
        assert (crew.tasks[0].description, crew.agents[1].goal) == (f"Answer: {ask(7, 8)}", "Write for sailors.")
        asked = len(lab.server.requests)
        wrapped = agl.wrap(crew, reward=lambda *_: 1.0, prompts=["task_1.description", "writer.goal"])
        texts = {name: prompt.template for name, prompt in wrapped.initial_prompts().items()}
        assert texts == {"task_1.description": "Answer: {{task}}", "writer.goal": "Write for {{reader}}."}
        lab.agent = agl.wrap(crew, reward=lambda *_: 1.0)
        (rollout,) = await lab.run(task_of(2, 3))
        assert rollout.attempt.error is None
        said = str([request.body["messages"] for request in lab.server.requests[asked:]])
    assert f"Answer: {ask(2, 3)}" in said
    assert "Write for children." in said
    assert ask(7, 8) not in said
    assert "sailors" not in said


def make_llm(endpoint: str) -> Any:
    from crewai import LLM

    return LLM("gpt-4o", base_url=endpoint, api_key="any", max_retries=0)


async def test_agents_with_the_same_role_keep_their_tasks_and_cannot_be_tuned_together() -> None:
    from crewai import Agent, Crew, Task

    papers, prices = (
        Agent(role="researcher", goal=goal, backstory="b", llm=make_llm(NOWHERE))
        for goal in ("Find papers.", "Find prices.")
    )
    first, second = (Task(description="Search.", expected_output="a list", agent=agent) for agent in (papers, prices))
    crew = Crew(agents=[papers, prices], tasks=[first, second])
    with pytest.raises(agl.ConfigError, match=r"different texts at 'researcher\.goal'.*role"):
        agl.wrap(crew, prompts=["researcher.goal"])
    lab = Lab(crew, lambda request: Answer(THE_END), reward=lambda *_: 1.0)
    rollout, _ = await run(lab)
    assert rollout.attempt.error is None
    systems = [request.body["messages"][0]["content"] for request in lab.server.requests]
    assert ["papers" in systems[0], "prices" in systems[1]] == [True, True]


async def test_a_model_class_that_is_defined_inside_a_flow_is_redirected() -> None:
    """CrewAI also defines classes late: it imports the class of a provider when its first model is created."""
    from crewai import Agent, Flow
    from crewai.flow.flow import start

    class Story(Flow[Any]):
        @start()
        def write(self) -> str:
            model = make_parrot()
            model.get_input_tokens_count("hello")
            return str(Agent(role="writer", goal="g", backstory="b", llm=model).kickoff("hello").raw)

    lab = Lab(Story(), [Answer(THE_END)], reward=lambda task, output, rollout: float(output == THE_END))
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert agl.find_final_reward(spans) == 1.0


async def test_no_span_of_an_ended_rollout_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning_integrations.crewai import agent as crewai_integration

    trees: list[Any] = []

    def make_tree(tracer: Any) -> Any:
        trees.append(SpanTree(tracer))
        return trees[-1]

    monkeypatch.setattr(crewai_integration, "SpanTree", make_tree)
    async with Lab(make_crew(), TestACrew().script, reward=lambda *_: 1.0) as lab:
        (rollout,) = await lab.run(task_of(2, 3))
        kept = [(tree._open, tree._omitted) for tree in trees]
        assert rollout.attempt.error is None
        assert kept == [({}, {})]
