"""AgentOps' instrumentation and decorators, with the real library and without AgentOps' cloud."""

from __future__ import annotations

import asyncio
import builtins
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from agentops.sdk.decorators import agent, operation, tool

from agentlightning import semconv
from agentlightning.adapter import TraceToMessages, TraceToTriplet
from agentlightning.emitter import emit_reward
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import ProxyLLM
from agentlightning.testing.tracer import TracerConformance
from agentlightning.tracer import AgentOpsTracer, Tracer
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.gateway.proxy import LLMProxy
from agentlightning_plugins.shared.scripted_model.server import EOS, Answer, ScriptedOpenAI, encode, logprob
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.core.tracer_semantics import TracerSemantics
from tests.waiting import LIMIT_S

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class TestAgentOpsTracer(TracerSemantics, TracerConformance):
    @pytest.fixture
    def tracer(self) -> Tracer:
        return AgentOpsTracer()


def test_four_runner_processes_trace_with_agentops(tmp_path: Path) -> None:
    """``AgentOpsTracer()`` reaches runners that are processes, and its spans say so."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import asyncio, sys
import agentlightning as agl
from agentlightning import semconv


@agl.rollout
def agent(task):
    from agentops.sdk.decorators import operation
    operation(lambda: task)()
    agl.emit_reward(float(task))


store = agl.create_store(f"sqlite:///{sys.argv[1]}/store.db")
trainer = agl.Trainer(
    algorithm=agl.Baseline(n_epochs=1), tracer=agl.AgentOpsTracer(), store=store, strategy="cs", n_runners=4
)
trainer.dev(agent, list(range(8)))


async def check():
    spans = await store.query_spans(None)
    assert len({span.rollout_id for span in spans}) == 8
    names = {span.resource.attributes.get(semconv.TRACER_NAME) for span in spans}
    assert names == {"agentops"}, names
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}
    await store.close()


asyncio.run(check())
"""
    )
    command = [sys.executable, str(script), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert said.returncode == 0, said.stderr


@pytest.fixture
def tracer() -> Iterator[AgentOpsTracer]:
    tracer = get_manager().create("tracer", "agentops")
    tracer.init()
    yield tracer
    tracer.teardown()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedOpenAI]:
    async with ScriptedOpenAI([Answer(tool_calls=[("add", {"a": 1, "b": 2})]), Answer("it is 3")]) as server:
        yield server


async def act(base_url: str) -> None:
    """Runs a decorated agent with a tool and two calls, the second of which is streamed."""

    @tool
    def add(a: int, b: int) -> int:
        return a + b

    @agent
    class Solver:
        @operation
        async def solve(self) -> None:
            async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
                messages: list[Any] = [{"role": "user", "content": "1+2?"}]
                reply = (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0]
                assert reply.message.tool_calls is not None
                (call,) = reply.message.tool_calls
                assert call.type == "function"
                result = add(**json.loads(call.function.arguments))
                messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
                stream = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], stream=True)
                assert [chunk async for chunk in stream]

    solver = Solver()
    await solver.solve()


async def test_a_decorated_agent_gives_exactly_the_expected_triplets(
    tracer: AgentOpsTracer, server: ScriptedOpenAI
) -> None:
    store = InMemoryLightningStore()
    models = [{"model": "m", "endpoint": server.endpoint, "api_key": "any"}]
    proxy = LLMProxy(model_list=models, store=store, require_keys=False)
    await proxy.start()

    async def run(number: int) -> AttemptedRollout:
        rollout = await store.start_rollout(number)
        resource = proxy.as_resource(model="m")
        assert isinstance(resource, ProxyLLM)
        ids: Any = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context(**ids, store=store) as trace:
            await act(resource.with_attempted_rollout(rollout).get_base_url())
            emit_reward(1.0)
        assert trace.dropped == 0
        return rollout

    rollout = await run(0)
    await proxy.flush()
    spans = list(await store.query_spans(rollout.rollout_id))
    asked, answered = TraceToTriplet(agent_match="^Solver$").adapt(spans)
    for triplet in (asked, answered):
        assert triplet.metadata["agent_name"] == "Solver"
        assert triplet.metadata["complete"] is True
        assert triplet.response["logprobs"] == [logprob(token) for token in triplet.response["token_ids"]]
    assert asked.prompt["token_ids"] == encode("<user>1+2?<assistant>")
    assert answered.response["token_ids"] == [*encode("it is 3"), EOS]
    assert [triplet.metadata["finish_reason"] for triplet in (asked, answered)] == ["tool_calls", "stop"]
    assert [triplet.reward for triplet in (asked, answered)] == [None, 1.0]
    (run_of_tool,) = [span for span in spans if semconv.is_tool_call(span)]
    assert semconv.read_tool_name(run_of_tool) == "add"
    _, history = TraceToMessages().adapt(spans)
    assert [message["role"] for message in history["messages"]] == ["user", "assistant", "tool", "assistant"]
    await proxy.stop()
    await store.close()


async def test_spans_recorded_only_by_agentops_are_adapted(tracer: AgentOpsTracer, server: ScriptedOpenAI) -> None:
    async with tracer.trace_context() as trace:
        await act(server.endpoint)
    calls = [span for span in trace.spans if semconv.is_llm_call(span)]
    assert {span.name for span in calls} == {"openai.chat.completion"}, "our instrumentation is off"
    assert len(calls) == 2
    assert all("gen_ai.prompt.0.role" in span.attributes for span in calls)
    asked, answered = TraceToTriplet().adapt(trace.spans)
    assert asked.prompt["raw_content"] == [{"role": "user", "content": "1+2?"}]
    (called,) = asked.response["raw_content"][0]["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert TraceToMessages().adapt(trace.spans)[0].get("tools") == [ADD]
    assert answered.response["raw_content"] == [{"role": "assistant", "content": "it is 3"}]
    assert [triplet.metadata["agent_name"] for triplet in (asked, answered)] == ["Solver", "Solver"]


async def test_eight_concurrent_agents_never_mix(tracer: AgentOpsTracer) -> None:
    async def run(number: int) -> list[Span]:
        async with tracer.trace_context() as trace, ScriptedOpenAI([Answer(f"answer {number}")]) as server:

            @agent(name=f"agent {number}")
            class Asker:
                async def ask(self) -> None:
                    async with openai.AsyncOpenAI(base_url=server.endpoint, api_key="any") as client:
                        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

            asker = Asker()
            await asker.ask()
            del asker
        return trace.spans

    for number, spans in enumerate(await asyncio.gather(*(run(number) for number in range(8)))):
        (triplet,) = TraceToTriplet().adapt(spans)
        assert triplet.metadata["agent_name"] == f"agent {number}"
        assert triplet.response["raw_content"][0]["content"] == f"answer {number}"


def test_agentops_changes_no_builtin_function_and_sends_no_request() -> None:
    """Uses a new process, because AgentOps permanently replaces ``print`` and ``__import__`` and sends telemetry."""
    code = """
import asyncio, builtins, os, socket
before = builtins.print, builtins.__import__
from agentlightning.tracer import AgentOpsTracer

def refuse(self, address):
    raise AssertionError(f"a connection was opened to {address}")

tracer = AgentOpsTracer()
tracer.init()
assert "openai" not in __import__("sys").modules
socket.socket.connect = refuse
import openai
async def main():
    from agentops.sdk.decorators import trace as session, operation
    @operation
    def step(): return 1
    @session
    def whole(): return step()
    async with tracer.trace_context() as trace:
        whole()
    names = [span.name for span in trace.spans]
    assert "step.task" in names and "whole.session" in names, names
asyncio.run(main())
assert (builtins.print, builtins.__import__) == before
tracer.teardown()
import agentops.sdk.core as core
assert core.tracer.initialized is False
"""
    assert builtins.print.__module__ == "builtins"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "no link to AgentOps' cloud is printed"


def test_teardown_restores_the_methods_of_clients() -> None:
    completions = openai.resources.chat.completions.AsyncCompletions
    before = vars(completions)["create"]
    for _ in range(2):
        tracer = AgentOpsTracer()
        tracer.init()
        assert vars(completions)["create"] is not before
        tracer.teardown()
        assert vars(completions)["create"] is before


async def test_calls_of_an_openai_agents_agent_have_the_agents_name(
    tracer: AgentOpsTracer, server: ScriptedOpenAI
) -> None:
    """AgentOps records the client's calls next to the agent's span; the adapter moves them under it."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    async with openai.AsyncOpenAI(base_url=server.endpoint, api_key="any") as client, tracer.trace_context() as trace:
        model = OpenAIChatCompletionsModel("m", openai_client=client)
        result = await Runner.run(Agent(name="solver", model=model, tools=[add]), "1+2?")
    assert result.final_output == "it is 3"
    asked, answered = TraceToTriplet(agent_match="^solver$").adapt(trace.spans)
    assert asked.metadata["finish_reason"] == "tool_calls"
    assert answered.response["raw_content"] == [{"role": "assistant", "content": "it is 3"}]


async def test_langgraph_works_while_agentops_is_active(tracer: AgentOpsTracer, server: ScriptedOpenAI) -> None:
    """AgentOps' instrumentor of LangGraph breaks ``create_agent`` if LangGraph is imported later."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    client = httpx2.AsyncClient()
    model = ChatOpenAI(model="m", base_url=server.endpoint, api_key=SecretStr("any"), http_async_client=client)
    async with client, tracer.trace_context() as trace:
        graph: Any = create_agent(model, tools=[add])
        result = await graph.ainvoke({"messages": [{"role": "user", "content": "1+2?"}]})
    assert result["messages"][-1].content == "it is 3"
    assert len(TraceToTriplet().adapt(trace.spans)) == 2
