"""Agent, tracer, gateway, store and adapter together: the spans of client and gateway become one triplet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentlightning import semconv
from agentlightning.adapter import LlmProxyTraceToTriplet, TraceToMessages, TraceToTriplet
from agentlightning.emitter import emit_message, emit_reward, operation
from agentlightning.reward import find_final_reward
from agentlightning.tracer import OtelTracer
from agentlightning.types import AttemptedRollout, Span, Triplet
from agentlightning_plugins.shared.scripted_model.server import (
    EOS,
    Answer,
    RecordedRequest,
    ScriptedOpenAI,
    encode,
    logprob,
)
from agentlightning_plugins.stores.http.client import LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.plugins.gateway.gateway_setup import ADD, Case, gateway


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    tracer = OtelTracer()
    tracer.init()
    yield tracer
    tracer.teardown()


def script(request: RecordedRequest) -> Answer:
    """Calls the tool once, then answers with its result."""
    last = request.body["messages"][-1]
    if last["role"] == "tool":
        return Answer(f"it is {last['content']}", extra={"weight_version": 7})
    number = int(last["content"])
    return Answer(tool_calls=[("add", {"a": number, "b": 1})], extra={"weight_version": 7})


async def act(client: AsyncOpenAI, number: int, *, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": str(number)}]
    agent: Any = {"agent.name": "solver"}
    with operation(name="solver", **agent):
        reply = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0].message
        assert reply.tool_calls is not None
        (call,) = reply.tool_calls
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}]
        if stream:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], stream=True)
            assert [chunk async for chunk in answer]
        else:
            await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    emit_reward(float(number))


async def run(case: Case, tracer: OtelTracer, number: int) -> tuple[AttemptedRollout, list[Span]]:
    rollout, client = await case.start()
    ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    async with tracer.trace_context(**ids, store=case.store) as trace:
        await act(client, number, stream=bool(number % 2))
    assert trace.dropped == 0
    return rollout, await case.spans(rollout)


def check(triplets: list[Triplet], number: int, agent_name: str | None) -> None:
    asked, answered = triplets
    assert asked.prompt["token_ids"] == encode(f"<user>{number}<assistant>")
    assert answered.response["token_ids"] == [*encode(f"it is {number + 1}"), EOS]
    for triplet in triplets:
        assert triplet.response["logprobs"] == [logprob(token) for token in triplet.response["token_ids"]]
        assert triplet.metadata["weight_version"] == 7
        assert triplet.metadata["agent_name"] == agent_name
        assert triplet.metadata["complete"] is True
    assert [triplet.metadata["finish_reason"] for triplet in triplets] == ["tool_calls", "stop"]
    assert [triplet.reward for triplet in triplets] == [None, float(number)]


async def test_16_concurrent_agents_each_get_their_own_triplets(tracer: OtelTracer) -> None:
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        attempts = await asyncio.gather(*(run(case, tracer, number) for number in range(16)))
    for number, (_, spans) in enumerate(attempts):
        assert len(spans) == 7, "a root, an operation, a reward, two spans of the client and two of the gateway"
        assert len({span.trace_id for span in spans}) == 1, "the gateway's spans are below the client's"
        assert find_final_reward(spans) == number
        check(TraceToTriplet().adapt(spans), number, "solver")
        check(TraceToTriplet(agent_match="^solver$").adapt(spans), number, "solver")
        check(LlmProxyTraceToTriplet().adapt(spans), number, "solver")


async def test_an_agent_without_instrumentation_gives_the_same_tokens(tracer: OtelTracer) -> None:
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        _, spans = await run(case, tracer, 3)
    gateway_alone = [span for span in spans if span.name not in ("openai.chat", "agentlightning.operation")]
    assert len(gateway_alone) == 4
    check(TraceToTriplet().adapt(gateway_alone), 3, None)


async def test_the_adapted_messages_are_the_agents_chat_history(tracer: OtelTracer) -> None:
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        _, spans = await run(case, tracer, 4)
    _, last = TraceToMessages().adapt(spans)
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "tool", "assistant"]
    call = last["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "add", "arguments": '{"a": 4, "b": 1}'}
    assert last["messages"][2]["tool_call_id"] == call["id"]
    assert last["messages"][3]["content"] == "it is 5"
    assert last["tools"] == [ADD]


async def test_each_of_n_sampled_answers_is_a_triplet(tracer: OtelTracer) -> None:
    async with ScriptedOpenAI([Answer("hello")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context(**ids, store=case.store):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], n=3)
            emit_reward(1.0)
        triplets = TraceToTriplet().adapt(await case.spans(rollout))
    assert [triplet.metadata["choice"] for triplet in triplets] == [0, 1, 2]
    texts = ["hello", "hello #1", "hello #2"]
    assert [triplet.response["token_ids"] for triplet in triplets] == [[*encode(text), EOS] for text in texts]
    assert [triplet.response["raw_content"][0]["content"] for triplet in triplets] == texts
    assert [triplet.reward for triplet in triplets] == [1.0] * 3


async def test_spans_of_many_concurrent_attempts_reach_a_served_store(tracer: OtelTracer) -> None:
    backing = InMemoryLightningStore()
    server = LightningStoreServer(backing, port=0)
    await server.start()
    store = LightningStoreClient(server.endpoint)
    tracer.init_worker("worker", store)

    async def act(number: int) -> str:
        rollout = await store.start_rollout(number)
        ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context(**ids) as trace:
            for _ in range(20):
                emit_message(str(number))
                await asyncio.sleep(0)
            emit_reward(float(number))
        assert trace.dropped == 0
        return rollout.rollout_id

    rollout_ids = await asyncio.gather(*(act(number) for number in range(16)))
    for number, rollout_id in enumerate(rollout_ids):
        spans = await backing.query_spans(rollout_id)
        assert [span.attributes[semconv.MESSAGE_BODY] for span in spans[:20]] == [str(number)] * 20
        assert [span.sequence_id for span in spans] == list(range(1, 23))
        assert find_final_reward(spans) == number
    await asyncio.to_thread(tracer.teardown_worker, "worker")
    await store.close()
    await server.stop()
    await backing.close()
