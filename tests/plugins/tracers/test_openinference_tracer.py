"""OpenInference's instrumentation as the source of spans, with its real packages."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from agentlightning import semconv
from agentlightning.adapter import TraceToTriplet
from agentlightning.emitter import emit_reward
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.testing.tracer import TracerConformance
from agentlightning.tracer import OpenInferenceTracer, Tracer
from agentlightning_plugins.shared.scripted_model.server import EOS, Answer, ScriptedOpenAI, encode, logprob
from tests.core.tracer_semantics import TracerSemantics
from tests.integrations.framework_agent import make_langchain_agent
from tests.plugins.gateway.gateway_setup import ADD, gateway

IMAGE = "data:image/png;base64," + "A" * 100_000


class TestOpenInferenceTracer(TracerSemantics, TracerConformance):
    @pytest.fixture
    def tracer(self) -> Tracer:
        return OpenInferenceTracer()


@pytest.fixture
def tracer() -> Iterator[OpenInferenceTracer]:
    tracer = get_manager().create("tracer", {"name": "openinference", "instrumentors": ["openai"]})
    tracer.init()
    yield tracer
    tracer.teardown()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedOpenAI]:
    async with ScriptedOpenAI([Answer(tool_calls=[("add", {"a": 1, "b": 2})]), Answer("it is 3")]) as server:
        yield server


async def act(client: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "1+2?"}]
    reply = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0].message
    assert reply.tool_calls is not None
    messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}]
    stream = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], stream=True)
    assert [chunk async for chunk in stream]


async def test_the_openinference_span_and_the_gateway_span_of_a_call_become_one_triplet(
    tracer: OpenInferenceTracer, server: ScriptedOpenAI
) -> None:
    """The span of the streamed call has no response id; it is matched by the request's ``traceparent``."""
    async with gateway(server) as case:
        rollout, client = await case.start()
        ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context(**ids, store=case.store):
            await act(client)
            emit_reward(1.0)
        spans = await case.spans(rollout)
    calls = [span for span in spans if semconv.is_llm_call(span)]
    names = [span.name for span in calls if not semconv.is_gateway_call(span)]
    assert names == ["ChatCompletion"] * 2, "our own instrumentation is off"
    assert len(calls) == 4
    asked, answered = TraceToTriplet().adapt(spans)
    assert asked.prompt["token_ids"] == encode("<user>1+2?<assistant>")
    assert answered.response["token_ids"] == [*encode("it is 3"), EOS]
    assert answered.response["logprobs"] == [logprob(token) for token in answered.response["token_ids"]]
    assert [triplet.reward for triplet in (asked, answered)] == [None, 1.0]


async def test_openinference_spans_are_read_without_gateway_spans(
    tracer: OpenInferenceTracer, server: ScriptedOpenAI
) -> None:
    async with tracer.trace_context() as trace, AsyncOpenAI(base_url=server.endpoint, api_key="any") as client:
        await act(client)
    asked, answered = TraceToTriplet().adapt(trace.spans)
    call = asked.response["raw_content"][0]["tool_calls"][0]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert [m["role"] for m in answered.prompt["raw_content"]] == ["user", "assistant", "tool"]
    assert answered.response["raw_content"] == [{"role": "assistant", "content": "it is 3"}]
    assert [triplet.metadata["finish_reason"] for triplet in (asked, answered)] == ["tool_calls", "stop"]


async def test_a_large_image_is_recorded_completely(tracer: OpenInferenceTracer, server: ScriptedOpenAI) -> None:
    content: Any = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    async with tracer.trace_context() as trace, AsyncOpenAI(base_url=server.endpoint, api_key="any") as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    (triplet,) = TraceToTriplet().adapt(trace.spans)
    assert triplet.prompt["image_urls"] == [IMAGE]


async def test_tool_and_model_calls_of_a_langchain_agent_are_read_with_its_name(server: ScriptedOpenAI) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    tracer = OpenInferenceTracer(["langchain"])
    tracer.init()
    client = httpx.AsyncClient()
    model = ChatOpenAI(model="m", base_url=server.endpoint, api_key=SecretStr("any"), http_async_client=client)
    graph: Any = make_langchain_agent(model, prompt=None, name="solver")
    async with client, tracer.trace_context() as trace:
        await graph.ainvoke({"messages": [{"role": "user", "content": "1+2?"}]})
    tracer.teardown()
    assert [semconv.read_tool_name(span) for span in trace.spans if semconv.is_tool_call(span)] == ["add"]
    triplets = TraceToTriplet().adapt(trace.spans)
    assert [triplet.response["raw_content"][0]["content"] or None for triplet in triplets] == [None, "it is 3"]
    has_names = any("lc_agent_name" in str(span.attributes.get("metadata")) for span in trace.spans)
    name = "solver" if has_names else "agent"  # create_react_agent records only the name of its node
    assert [triplet.metadata["agent_name"] for triplet in triplets] == [name, name]


async def test_a_node_of_a_langgraph_graph_is_an_agent(server: ScriptedOpenAI) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph
    from pydantic import SecretStr

    tracer = OpenInferenceTracer(["langchain"])
    tracer.init()
    client = httpx.AsyncClient()
    model = ChatOpenAI(model="m", base_url=server.endpoint, api_key=SecretStr("any"), http_async_client=client)

    async def write(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("writer", write)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", END)
    async with client, tracer.trace_context() as trace:
        await graph.compile().ainvoke({"messages": [{"role": "user", "content": "1+2?"}]})
    tracer.teardown()
    assert [triplet.metadata["agent_name"] for triplet in TraceToTriplet().adapt(trace.spans)] == ["writer"]


def test_an_instrumentor_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"no OpenInference instrumentor 'opena'. Did you mean 'openai'\? Installed: .*openai"
    ):
        OpenInferenceTracer(["opena"])


async def test_spans_of_the_users_own_instrumentation_are_recorded_too(server: ScriptedOpenAI) -> None:
    """Runs in a separate process: the global provider is set once. Both record each call, which stays one triplet."""
    code = f"""
import asyncio
from openinference.instrumentation.openai import OpenAIInstrumentor
from agentlightning.adapter import TraceToTriplet
from agentlightning.semconv import is_llm_call
from agentlightning.tracer import OtelTracer

async def main():
    tracer = OtelTracer()
    tracer.init()
    OpenAIInstrumentor().instrument()
    from openai import AsyncOpenAI
    async with tracer.trace_context() as trace, AsyncOpenAI(base_url={server.endpoint!r}, api_key="any") as client:
        for text in ("one", "two"):
            await client.chat.completions.create(model="m", messages=[{{"role": "user", "content": text}}])
    assert len([span for span in trace.spans if is_llm_call(span)]) == 4
    triplets = TraceToTriplet().adapt(trace.spans)
    assert [t.prompt["raw_content"][0]["content"] for t in triplets] == ["one", "two"], triplets

asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
