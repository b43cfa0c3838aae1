from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import get_llm_cache, set_llm_cache
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import context as langchain_context
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel, SecretStr

import agentlightning as agl
from agentlightning.adapter.call import find_states
from agentlightning.testing.agent import AGENT_NAME, MODEL, AgentConformance, Lab, ask, is_tool_span
from agentlightning.tracer import OtelTracer
from agentlightning_plugins.shared.scripted_model.server import Answer
from tests.integrations.framework_agent import NOWHERE, PROMPTS, make_langchain_agent, make_react_agent

pytestmark = pytest.mark.environment("main", "oldest")  # tests/newest has a few of these

MODEL_OF_THE_MODULE = ChatOpenAI(model="gpt-5", api_key=SecretStr("any"), base_url=NOWHERE, max_retries=0)
"""A global model that nodes use, as in most code with LangGraph."""


class TestCreateAgent(AgentConformance):
    prompt_path = PROMPTS["langchain"]

    @pytest.fixture
    def agent(self) -> Any:
        return make_langchain_agent()


@pytest.mark.parametrize(
    "test",
    [
        AgentConformance.test_each_model_call_is_a_triplet_with_tokens_agent_and_reward,
        AgentConformance.test_a_prompt_changes_between_rollouts_and_the_object_stays_unchanged,
        AgentConformance.test_it_can_be_sent_to_a_runner_process,
    ],
    ids=lambda test: test.__name__,
)
async def test_the_model_node_of_create_react_agent_is_found(test: Callable[..., Any]) -> None:
    await test(TestCreateAgent(), make_react_agent())


def make_graph(is_async: bool) -> Any:
    """Returns a graph of two nodes that call a global model, and the calculator as a third."""

    def draft(state: MessagesState) -> Any:
        return {"messages": [MODEL_OF_THE_MODULE.invoke(state["messages"])]}

    async def draft_async(state: MessagesState) -> Any:
        return {"messages": [await MODEL_OF_THE_MODULE.ainvoke(state["messages"])]}

    def review(state: MessagesState) -> Any:
        text = "".join(str(chunk.content) for chunk in MODEL_OF_THE_MODULE.stream([("user", "review")]))
        return {"messages": [AIMessage(text)]}

    graph = StateGraph(MessagesState)
    graph.add_node("draft", draft_async if is_async else draft)
    graph.add_node("review", review)
    graph.add_node("calculate", make_langchain_agent())
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "review")
    graph.add_edge("review", "calculate")
    graph.add_edge("calculate", END)
    return graph.compile()


def script_of_graph(request: Any) -> Answer:
    if not request.body.get("tools"):
        return Answer("noted")
    called = any(message["role"] == "tool" for message in request.body["messages"])
    return Answer("The sum is 5.") if called else Answer(tool_calls=[("add", {"a": 2, "b": 3})])


@pytest.mark.parametrize("is_async", [False, True])
async def test_nodes_of_a_graph_are_agents_and_a_global_model_calls_the_rollouts_endpoint(is_async: bool) -> None:
    async with Lab(make_graph(is_async), script_of_graph) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
        assert {request.body["model"] for request in lab.server.requests} == {MODEL}
    assert rollout.attempt.error is None
    triplets = agl.TraceToTriplet().adapt(spans)
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["draft", "review", AGENT_NAME, AGENT_NAME]
    assert [triplet.reward for triplet in triplets] == [None, None, None, 1.0]
    only = agl.TraceToTriplet(agent_match="draft|review").adapt(spans)
    assert [triplet.metadata["agent_name"] for triplet in only] == ["draft", "review"]


async def test_the_prompt_of_an_agent_inside_a_graph_can_be_tuned() -> None:
    async with Lab(make_graph(False), script_of_graph, prompts=[f"{AGENT_NAME}.system_prompt"]) as lab:
        await lab.run(ask(2, 3), resources={f"{AGENT_NAME}.system_prompt": "Be polite."})
        systems = [
            request.body["messages"][0]["content"] for request in lab.server.requests if request.body.get("tools")
        ]
    assert systems == ["Be polite."] * 2


def make_two_agents(prompts: tuple[str, str], names: tuple[str, str] = ("writer", "critic"), extra: str = "") -> Any:
    """Returns a graph of two agents, and with ``extra`` a node that sends the first prompt followed by ``extra``."""

    async def send(state: MessagesState) -> Any:
        return {
            "messages": [await MODEL_OF_THE_MODULE.ainvoke([SystemMessage(prompts[0] + extra), *state["messages"]])]
        }

    graph = StateGraph(MessagesState)
    for node, prompt, name in zip(("first", "second"), prompts, names, strict=True):
        graph.add_node(node, make_langchain_agent(prompt=prompt, name=name))
    graph.add_edge(START, "first").add_edge("first", "second")
    if extra:
        graph.add_node("third", send).add_edge("second", "third")
    return graph.compile()


async def system_prompts(graph: Any, texts: dict[str, str]) -> list[str]:
    """Runs a graph with these texts; returns the first message of each request."""
    async with Lab(graph, [Answer("ok")], prompts=list(texts), reward=lambda *_: 1.0) as lab:
        (rollout,) = await lab.run("hello", resources=texts)
        assert rollout.attempt.error is None
        return [request.body["messages"][0]["content"] for request in lab.server.requests]


@pytest.mark.parametrize(
    "own", [("Help.", "Help."), ("Help.", "Help. Be brief."), ("", "Help.")], ids=["equal", "prefix", "empty"]
)
async def test_each_agent_of_a_graph_gets_its_own_prompt_even_if_texts_are_equal_or_empty(own: tuple[str, str]) -> None:
    graph = make_two_agents(own)
    both = {"writer.system_prompt": "New W.", "critic.system_prompt": "New C."}
    assert await system_prompts(graph, both) == ["New W.", "New C."]
    assert await system_prompts(graph, {"writer.system_prompt": "New W."}) == ["New W.", own[1]]
    assert await system_prompts(graph, {"critic.system_prompt": "New C."}) == [own[0], "New C."]


async def test_an_extended_system_message_is_matched_by_the_longest_text() -> None:
    graph = make_two_agents(("Help. Be brief.", "Help."), extra=" Answer in French.")
    texts = {"writer.system_prompt": "New W.", "critic.system_prompt": "New C."}
    assert await system_prompts(graph, texts) == ["New W.", "New C.", "New W. Answer in French."]
    texts = {"critic.system_prompt": "New C."}
    assert (await system_prompts(graph, texts))[2] == "Help. Be brief. Answer in French."


async def test_an_extended_system_message_that_matches_two_agents_is_refused() -> None:
    graph = make_two_agents(("Help.", "Help."), extra=" Answer in French.")
    lab = Lab(graph, [Answer("ok")], prompts=["writer.system_prompt"], reward=lambda *_: 1.0)
    async with lab:
        (rollout,) = await lab.run("hello")
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.type == "ConfigError"
    assert "critic.system_prompt and writer.system_prompt are the same text" in rollout.attempt.error.message


async def test_agents_with_the_same_name_are_tuned_together_only_if_their_texts_are_equal() -> None:
    names = ("writer", "writer")
    tuned = await system_prompts(make_two_agents(("Help.", "Help."), names), {"writer.system_prompt": "New."})
    assert tuned == ["New.", "New."]
    with pytest.raises(agl.ConfigError, match=r"different texts at 'writer\.system_prompt'"):
        agl.wrap(make_two_agents(("Help.", "Hinder."), names), prompts=["writer.system_prompt"])


async def test_messages_of_prompt_templates_can_be_tuned_and_keep_their_variables() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You are {mood}."), ("human", "{question}"), ("system", "Mind your words.")]
    )
    chain = prompt | MODEL_OF_THE_MODULE | RunnableLambda(lambda message: message.content)
    prompts = {"prompt.system": "style", "prompt.system2": "Mind your numbers."}
    task: Any = {"mood": "kind", "question": ask(2, 3)}
    async with Lab(chain, [Answer("The sum is 5.")], prompts=prompts, reward=lambda *_: 1.0) as lab:
        for style in ("Always be {{mood}}.", "Never be other than {{mood}}."):
            await lab.run(task, resources={"style": style})
        asked = [[message["content"] for message in request.body["messages"]] for request in lab.server.requests]
    assert asked == [
        ["Always be kind.", ask(2, 3), "Mind your numbers."],
        ["Never be other than kind.", ask(2, 3), "Mind your numbers."],
    ]
    with pytest.raises(agl.ConfigError, match=r"Its texts: prompt.human, prompt.system, prompt.system2"):
        agl.wrap(chain, prompts=["system"])


async def test_a_model_with_structured_output_calls_the_rollouts_endpoint() -> None:
    class Sum(BaseModel):
        value: int

    chain = MODEL_OF_THE_MODULE.with_structured_output(Sum, method="function_calling")
    seen: list[Any] = []
    answers = [Answer(tool_calls=[("Sum", {"value": 5})])]
    async with Lab(chain, answers, reward=lambda task, output, rollout: seen.append(output) or 1.0) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        assert lab.server.requests[0].body["model"] == MODEL
    assert rollout.attempt.error is None
    assert seen == [Sum(value=5)]


async def test_cached_answers_of_langchain_are_not_used() -> None:
    before = get_llm_cache()
    set_llm_cache(InMemoryCache())
    try:
        async with Lab(MODEL_OF_THE_MODULE, [Answer("The sum is 5.")]) as lab:
            rollouts = await lab.run(ask(2, 3), ask(2, 3))
            assert len(lab.server.requests) == 2
    finally:
        set_llm_cache(before)
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 2


async def test_a_model_that_cannot_be_redirected_fails_the_attempt_with_the_reason() -> None:
    model = GenericFakeChatModel(messages=iter(["hi"]))
    async with Lab(model) as lab:
        (rollout,) = await lab.run(ask(2, 3))
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.type == "ConfigError"
    assert "GenericFakeChatModel, which does not use OpenAI's API" in rollout.attempt.error.message


async def test_an_error_of_a_node_is_recorded_on_its_span_and_on_the_attempt() -> None:
    def fail(state: MessagesState) -> Any:
        raise LookupError("the tool is down")

    graph = StateGraph(MessagesState)
    graph.add_node("broken", fail)
    graph.add_edge(START, "broken")
    async with Lab(graph.compile()) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    error = rollout.attempt.error
    assert error is not None
    assert (error.type, error.message.splitlines()[0]) == ("LookupError", "the tool is down")
    assert "raise LookupError" in error.traceback
    failed = {span.name for span in spans if span.status.status_code == "ERROR"}
    assert {"node broken", "invoke_agent LangGraph"} <= failed


async def test_models_and_agents_are_unchanged_outside_rollouts() -> None:
    async with Lab(make_langchain_agent()) as lab:
        await lab.run(ask(2, 3))
        model = ChatOpenAI(model="theirs", api_key=SecretStr("any"), base_url=lab.server.endpoint, max_retries=0)
        agent = make_langchain_agent(model, name=None)
        result = await agent.ainvoke({"messages": [("user", ask(4, 5))]})
        await model.root_async_client.close()
        assert result["messages"][-1].content == "The sum is 9."
        assert [request.body["model"] for request in lab.server.requests[2:]] == ["theirs"] * 2


async def test_a_function_that_uses_langchain_is_traced_as_well() -> None:
    async def calculator(task: str, llm: agl.LLM) -> str:
        model = ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=SecretStr(llm.api_key or "unused"))
        agent = make_langchain_agent(model, prompt=None)
        answer = str(await agent.ainvoke({"messages": [("user", task)]}))
        await model.root_async_client.close()  # before langchain-openai 1.0 nothing else closes it
        return answer

    async with Lab(calculator) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    assert [triplet.metadata["agent_name"] for triplet in agl.TraceToTriplet().adapt(spans)] == [AGENT_NAME] * 2
    assert len([span for span in spans if is_tool_span(span)]) == 1


async def test_the_langchain_handler_of_a_tracer_can_also_be_passed_explicitly() -> None:
    async def calculator(task: str, llm: agl.LLM) -> str:
        tracer = agl.get_active_tracer()
        assert tracer is not None
        model = ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=SecretStr(llm.api_key or "unused"))
        agent = make_langchain_agent(model, prompt=None)
        handler = tracer.get_langchain_handler()
        answer = str(await agent.ainvoke({"messages": [("user", task)]}, config={"callbacks": [handler]}))
        await model.root_async_client.close()
        return answer

    async with Lab(calculator) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    assert rollout.attempt.error is None
    assert len([span for span in spans if is_tool_span(span)]) == 1


def test_the_langchain_handler_is_removed_with_the_last_tracer() -> None:
    before = list(langchain_context._configure_hooks)
    tracer = OtelTracer()
    tracer.init()
    assert len(langchain_context._configure_hooks) == len(before) + 1
    tracer.teardown()
    assert langchain_context._configure_hooks == before


async def test_parallel_branches_of_one_rollout_keep_their_parents() -> None:
    """The model call of each branch is under the node of the branch, although branches run concurrently."""

    def branch(name: str) -> Any:
        async def run(state: MessagesState) -> Any:
            answer = await MODEL_OF_THE_MODULE.ainvoke([("user", f"I am {name}")])
            await asyncio.sleep(0.02)
            return {"messages": [answer]}

        return run

    graph = StateGraph(MessagesState)
    names = [f"branch_{number}" for number in range(4)]
    for name in names:
        graph.add_node(name, branch(name))
        graph.add_edge(START, name)
    async with Lab(graph.compile(), lambda request: Answer("ok", delay_s=0.05), reward=lambda *_: 1.0) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    triplets = agl.TraceToTriplet().adapt(spans)
    said = {triplet.prompt["raw_content"][0]["content"]: triplet.metadata["agent_name"] for triplet in triplets}
    assert said == {f"I am {name}": name for name in names}


class Notes(TypedDict, total=False):
    question: str
    documents: list[str]
    messages: list[Any]


async def test_the_state_of_a_graph_s_nodes_is_the_state_of_the_agent_without_the_messages() -> None:
    graph = StateGraph(Notes)
    graph.add_node("search", lambda state: {"documents": ["a map"]})
    graph.add_node("write", lambda state: {"messages": ["done"]})
    graph.add_edge(START, "search")
    graph.add_edge("search", "write")
    tracer = agl.OtelTracer()
    async with tracer.trace_context() as trace:
        await graph.compile().ainvoke({"question": "where?", "messages": []})
    assert [state.changed for state in find_states(trace.spans)] == [{"question": "where?"}, {"documents": ["a map"]}]
