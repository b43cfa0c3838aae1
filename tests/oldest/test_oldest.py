"""Training with the oldest supported version of every library: store, tracer, gateway, client and a runner process."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from typing import Any

import openai
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import BaseModel

import agentlightning as agl
from agentlightning import semconv
from agentlightning.store import LightningStoreServer
from agentlightning_algorithms.shared.prompt_search.budget import read_usage
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.source import pyproject, run_python

EXTRAS = ("langchain", "openai", "openai-agents", "openinference", "otlp", "postgresql")


def test_every_library_has_its_lowest_version() -> None:
    project = pyproject()["project"]
    wrong = []
    for line in project["dependencies"] + [
        line for extra in EXTRAS for line in project["optional-dependencies"][extra]
    ]:
        requirement = Requirement(line)
        (bound,) = requirement.specifier
        installed = importlib.metadata.version(requirement.name)
        if Version(installed) != Version(bound.version):
            wrong.append(f"{line}: {installed} is installed")
    assert wrong == []


def answering_agent(task: str, llm: agl.LLM) -> float:
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "any")
    with client:
        reply = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(reply.choices[0].message.content == "The sum is 5.")


@pytest.mark.parametrize("strategy", ["shm", "cs"])
async def test_a_run_records_calls_at_the_client_and_at_the_gateway(strategy: str) -> None:
    async with ScriptedOpenAI([Answer("The sum is 5.")] * 4) as model:
        store = agl.create_store("memory://")
        proxy = agl.LLMProxy(model_list=[{"model": "m", "endpoint": model.endpoint, "api_key": "any"}], store=store)
        await proxy.start()
        try:
            trainer = agl.Trainer(
                store=store, strategy=strategy, trackers=[], initial_resources={"llm": proxy.as_resource(model="m")}
            )
            run = await asyncio.to_thread(trainer.dev, answering_agent, ["2 + 3?", "3 + 2?"])
            await proxy.flush()
        finally:
            await proxy.stop()
        assert run.status == "succeeded"
        for rollout in await store.query_rollouts():
            spans = (await store.query_spans(rollout.rollout_id)).items
            assert agl.find_final_reward(spans) == 1.0
            calls = [span for span in spans if semconv.is_llm_call(span)]
            assert sorted(semconv.is_gateway_call(span) for span in calls) == [False, True]
            for span in calls:
                assert semconv.read_input_messages(span)[0]["content"] == rollout.input
                assert semconv.read_output_messages(span)[0]["content"] == "The sum is 5."
            (usage,) = read_usage(spans)
            assert usage.prompt_tokens > 0
            assert usage.completion_tokens > 0
            assert [triplet.reward for triplet in agl.TraceToTriplet().adapt(spans)] == [1.0]
        await store.close()


async def test_a_served_store_accepts_the_requests_of_a_client(tmp_path: Any) -> None:
    store = agl.create_store(f"sqlite:///{tmp_path}/agl.db")
    async with LightningStoreServer(store, port=0) as server:
        client = agl.LightningStoreClient(server.endpoint)
        await client.add_resources({"prompt": "Add {a}"})
        rollout = await client.start_rollout({"a": 1})
        await client.add_span(
            agl.emit_reward(0.5, propagate=False).model_copy(
                update={"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            )
        )
        await client.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        (ended,) = await client.wait_for_rollouts([rollout.rollout_id], timeout=30)
        assert ended.status == "succeeded"
        assert agl.find_final_reward(await client.query_spans(rollout.rollout_id)) == 0.5
        await client.close()
    await store.close()


async def test_each_answer_of_the_responses_api_is_recorded_whether_created_or_parsed() -> None:
    class Sum(BaseModel):
        value: int

    tracer = agl.OtelTracer()
    tracer.init()
    async with (
        ScriptedOpenAI(lambda request: Answer('{"value": 5}')) as model,
        openai.AsyncOpenAI(base_url=model.endpoint, api_key="any") as client,
        tracer.trace_context() as trace,
    ):
        await client.responses.create(model="m", input="2 + 3?")
        parsed = await client.responses.parse(model="m", input="2 + 3?", text_format=Sum)
    tracer.teardown()
    assert parsed.output_parsed == Sum(value=5)
    calls = [span for span in trace.spans if semconv.is_llm_call(span)]
    assert [semconv.read_output_messages(call)[0]["content"] for call in calls] == ['{"value": 5}'] * 2


def test_the_command_line_works() -> None:
    rows = json.loads(run_python("-m", "agentlightning", "plugins", "--json"))
    assert [row["plugin"] for row in rows if row["state"] != "loaded"] == []
    assert "baseline" in run_python("-m", "agentlightning", "plugins")
