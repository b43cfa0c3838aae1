from __future__ import annotations

import asyncio
from typing import Any

import autogen_agentchat.agents._base_chat_agent as agent_module
import autogen_core.tools._base as tools_module
import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import Team
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.models import ModelFamily
from autogen_core.tools import BaseTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, MODEL, AgentConformance, Lab, answer, ask, is_tool_span
from agentlightning_integrations.autogen import agent as autogen_integration
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.integrations.framework_agent import NOWHERE, PROMPTS, make_autogen_agent
from tests.integrations.team import THE_END, WRITER, TeamTests, names_and_texts, run
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main")  # tests/newest has a few of these


class TestAutoGen(AgentConformance):
    prompt_path = PROMPTS["autogen"]

    @pytest.fixture
    def agent(self) -> Any:
        return make_autogen_agent()


def make_model(**more: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model="gpt-4o", api_key="any", base_url=NOWHERE, max_retries=0, **more)


def make_writer() -> AssistantAgent:
    return AssistantAgent("writer", make_model(), system_message=WRITER, description="Writes.")


def make_team() -> RoundRobinGroupChat:
    return RoundRobinGroupChat(
        [make_autogen_agent(), make_writer()], termination_condition=TextMentionTermination(THE_END)
    )


def script(request: RecordedRequest) -> Answer:
    """Answers for a calculator, a writer that ends, a selector that chooses the writer last, and a leader."""
    messages = request.body["messages"]
    system, last = messages[0]["content"], messages[-1]
    if "writ" in system.lower():
        return Answer(THE_END)
    if "select" in system.lower():
        return Answer("writer" if "The sum is" in str(messages) else AGENT_NAME)
    if "lead" in system.lower() and last["role"] == "user":
        return Answer(tool_calls=[(AGENT_NAME, {"task": ask(2, 3)})])
    if last["role"] == "user" and "The sum is" in str(messages):
        return Answer("done")
    return answer(request)


def texts_of(output: Any) -> list[str]:
    return [message.to_text() for message in output.messages]


class TestATeam(TeamTests):
    @pytest.fixture
    def team(self) -> Any:
        return make_team()

    def last_words(self, output: Any) -> str:
        return texts_of(output)[-1]


async def test_texts_of_all_agents_of_a_team_can_be_tuned() -> None:
    lab = Lab(make_team(), script, prompts={"writer.system_message": "write_style", "writer.description": None})
    rollout, _ = await run(lab, resources={"write_style": "You write rhymes."})
    assert rollout.attempt.error is None
    assert lab.server.requests[-1].body["messages"][0]["content"] == "You write rhymes."
    assert lab.server.requests[0].body["messages"][0]["content"] != "You write rhymes."


async def test_the_model_of_a_team_and_agents_that_are_tools_call_the_rollouts_endpoint() -> None:
    inner = make_autogen_agent()
    leader = AssistantAgent("leader", make_model(parallel_tool_calls=False), tools=[AgentTool(inner)],
                            system_message="You lead.", max_tool_iterations=2)  # fmt: skip
    rollout, spans = await run(Lab(leader, script))
    assert rollout.attempt.error is None
    assert [name for name, _ in names_and_texts(spans)] == ["leader", AGENT_NAME, AGENT_NAME, "leader"]
    assert [span.attributes["gen_ai.tool.name"] for span in spans if is_tool_span(span)] == ["add", AGENT_NAME]

    selecting = SelectorGroupChat(
        [make_autogen_agent(), make_writer()],
        make_model(),
        selector_prompt="Select one of {participants} for {history}: {roles}",
        termination_condition=TextMentionTermination(THE_END),
    )
    lab = Lab(selecting, script, prompts=[f"{selecting.name}.selector_prompt"])
    rollout, spans = await run(lab)
    assert rollout.attempt.error is None
    assert names_and_texts(spans)[-1] == ("writer", THE_END)
    assert {request.body["model"] for request in lab.server.requests} == {MODEL}


async def test_a_society_of_mind_uses_the_rollouts_endpoint_inside_and_outside() -> None:
    inner = RoundRobinGroupChat([make_autogen_agent()], termination_condition=MaxMessageTermination(3))
    agent = SocietyOfMindAgent("society", inner, make_model(), instruction="Write of this:")
    rollout, spans = await run(Lab(agent, script, prompts=["society.instruction"]))
    assert rollout.attempt.error is None
    assert names_and_texts(spans)[-1] == ("society", THE_END)


async def test_any_model_client_is_redirected_to_the_rollouts_endpoint_if_there_is_one() -> None:
    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "structured_output": False,
        "family": ModelFamily.UNKNOWN,
    }
    replay = ReplayChatCompletionClient(["replayed"], model_info=info)
    agent = AssistantAgent(AGENT_NAME, replay)
    lab = Lab(agent, [Answer("from the endpoint")], reward=lambda task, output, rollout: len(texts_of(output)[-1]))
    _, spans = await run(lab)
    assert agl.find_final_reward(spans) == len("from the endpoint")

    alone = agl.wrap(agent, reward=lambda task, output, rollout: float(texts_of(output)[-1] == "replayed"))
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer())
    store = agl.InMemoryLightningStore()
    with runner.run_context(agent=alone, store=store):
        ended = await runner.step("task")
    assert agl.find_final_reward(await store.query_spans(ended.rollout_id)) == 1.0
    await store.close()


async def test_a_task_can_be_given_as_messages_of_autogen() -> None:
    def reward(task: Any, output: Any, rollout: agl.Rollout) -> float:
        return float(texts_of(output)[0] == "2 + 3")

    agent = agl.wrap(make_autogen_agent(), reward=reward)
    messages = agl.wrap(make_autogen_agent(), reward=reward, task_to_input=lambda task: [
        TextMessage(content="2 + 3", source="user")])  # fmt: skip
    async with Lab(make_autogen_agent()) as lab:
        for wrapped in (agent, messages):
            lab.agent = wrapped
            (rollout,) = await lab.run({"question": "2 + 3"})
            assert agl.find_final_reward(await lab.spans(rollout)) == 1.0


async def test_a_failed_tool_is_a_failed_span_and_the_agent_continues() -> None:
    def add(a: int, b: int) -> int:
        """Adds."""
        raise LookupError("no such number")

    agent = AssistantAgent(AGENT_NAME, make_model(), tools=[add], max_tool_iterations=3)
    rollout, spans = await run(Lab(agent))
    assert rollout.attempt.error is None
    (tool,) = [span for span in spans if is_tool_span(span)]
    assert tool.status.status_code == "ERROR"
    assert "no such number" in tool.model_dump_json()


async def test_a_team_stops_immediately_even_if_an_agent_ignores_the_cancellation_token() -> None:
    at_work, ended = asyncio.Event(), asyncio.Event()

    class Deaf(AssistantAgent):
        def __deepcopy__(self, memo: Any) -> Any:
            return self  # a copy would set copies of the events

        async def on_messages_stream(self, messages: Any, cancellation_token: Any) -> Any:
            at_work.set()
            try:
                await asyncio.sleep(60)
                yield messages
            finally:
                ended.set()

    team = RoundRobinGroupChat([Deaf("deaf", make_model())], termination_condition=MaxMessageTermination(3))
    rollout = agl.Rollout(rollout_id="ro-1", input="task", start_time=0.0)
    work = asyncio.create_task(agl.wrap(team).rollout_async("task", {}, rollout))
    await at_work.wait()
    work.cancel()
    await asyncio.wait_for(asyncio.gather(work, return_exceptions=True), LIMIT_S)
    assert work.cancelled()
    assert ended.is_set()


def test_a_team_with_its_own_runtime_is_refused() -> None:
    team = RoundRobinGroupChat([make_writer()], runtime=SingleThreadedAgentRuntime())
    with pytest.raises(agl.ConfigError, match="has its own runtime"):
        agl.wrap(team)


async def test_an_agent_that_cannot_be_copied_is_refused_with_an_alternative() -> None:
    agent = make_writer()
    agent.rest = (task for task in ())  # a generator, as in an agent class of a user
    rollout, _ = await run(Lab(agent))
    assert rollout.attempt.error is not None
    assert "'writer' cannot be copied" in rollout.attempt.error.message
    assert "@agl.rollout" in rollout.attempt.error.message


async def test_spans_of_autogen_are_unchanged_outside_attempts_and_undo_restores_its_functions() -> None:
    before = [BaseTool.run_json, vars(tools_module)["trace_tool_span"], AssistantAgent.on_messages_stream,
              vars(agent_module)["trace_invoke_agent_span"]]  # fmt: skip
    undo = autogen_integration.instrument(TracerProvider())
    assert BaseTool.run_json is not before[0]
    with vars(agent_module)["trace_invoke_agent_span"](agent_name="any") as span:
        assert span is not None
        assert otel.get_current_span() is span
    undo()
    assert [BaseTool.run_json, vars(tools_module)["trace_tool_span"], AssistantAgent.on_messages_stream,
            vars(agent_module)["trace_invoke_agent_span"]] == before  # fmt: skip


def test_the_error_about_an_unknown_text_of_a_team_suggests_a_similar_path() -> None:
    team: Team = make_team()
    with pytest.raises(agl.ConfigError, match=r"writer\.sistem_message'\. Did you mean 'writer\.system_message'"):
        agl.wrap(team, prompts=["writer.sistem_message"])


def test_different_texts_of_agents_with_the_same_name_cannot_be_tuned() -> None:
    namesake = AssistantAgent("writer", make_model(), system_message="Decide.")
    team = RoundRobinGroupChat([SocietyOfMindAgent("society", make_team(), make_model()), namesake])
    with pytest.raises(agl.ConfigError, match=r"different texts at 'writer\.system_message'"):
        agl.wrap(team, prompts=["writer.system_message"])


def test_a_system_message_cannot_be_tuned_if_another_agent_of_the_same_name_has_none() -> None:
    namesake = AssistantAgent("writer", make_model(), system_message=None)
    team = RoundRobinGroupChat([SocietyOfMindAgent("society", make_team(), make_model()), namesake])
    with pytest.raises(agl.ConfigError, match=r"different texts at 'writer\.system_message'"):
        agl.wrap(team, prompts=["writer.system_message"])
    with pytest.raises(agl.ConfigError, match=r"no text 'writer\.system_message'"):
        agl.wrap(namesake, prompts=["writer.system_message"])
