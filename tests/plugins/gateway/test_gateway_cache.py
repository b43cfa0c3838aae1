"""The gateway's cache of answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.shared.prompt_search.budget import read_usage
from agentlightning_plugins.commands.report.report import write_report
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import HELLO, entry, gateway


def number_of_the_request(server: list[ScriptedOpenAI]) -> Any:
    return lambda _: Answer(f"answer {len(server[0].requests)}")


async def ask(client: openai.AsyncOpenAI, **parameters: Any) -> str:
    reply = await client.chat.completions.create(**{"model": "m", "messages": HELLO, **parameters})
    if not parameters.get("stream"):
        return reply.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply if chunk.choices])


async def respond(client: openai.AsyncOpenAI, **parameters: Any) -> str:
    return (await client.responses.create(model="m", input="Say hello.", **parameters)).output_text


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        (ask, {"temperature": 0}),
        (ask, {"seed": 3}),
        (ask, {"temperature": 0, "stream": True}),
        (respond, {"temperature": 0}),
    ],
    ids=["temperature", "seed", "stream", "responses"],
)
async def test_a_repeated_request_gets_the_recorded_answer(call: Any, parameters: Any) -> None:
    servers: list[ScriptedOpenAI] = []
    async with ScriptedOpenAI(number_of_the_request(servers)) as server, gateway(server, cache=True) as case:
        servers.append(server)
        first, client = await case.start()
        second, other_client = await case.start()
        assert await call(client, **parameters) == "answer 1"
        assert await call(other_client, **parameters) == "answer 1"
        assert len(server.requests) == 1
        asked, cached = await case.span(first), await case.span(second)
        assert cached.name == asked.name + semconv.CACHED_SUFFIX
        for key in (semconv.GEN_AI_OUTPUT_MESSAGES, semconv.RESPONSE_TOKEN_IDS, semconv.GATEWAY_COMPLETE):
            assert cached.attributes[key] == asked.attributes[key]
        assert [len(read_usage([span])) for span in (asked, cached)] == [1, 0]


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"cache": True}, {"temperature": 0.1}, {"temperature": 0.1}),
        ({"cache": True}, {}, {}),
        ({"cache": True}, {"temperature": 0}, {"temperature": 0, "max_tokens": 5}),
        ({"cache": True}, {"seed": 1}, {"seed": 2}),
        ({}, {"temperature": 0}, {"temperature": 0}),
    ],
    ids=["warm", "default", "other request", "other seed", "off"],
)
async def test_requests_that_the_cache_must_not_answer_are_sent_to_the_model(
    settings: Any, first: Any, second: Any
) -> None:
    async with ScriptedOpenAI([Answer("1"), Answer("2")]) as server, gateway(server, **settings) as case:
        _, client = await case.start()
        assert [await ask(client, **first), await ask(client, **second)] == ["1", "2"]


async def test_a_failed_answer_or_an_answer_of_other_weights_is_not_reused() -> None:
    script = [Answer(status=400, error="no"), Answer("2"), Answer("3")]
    async with ScriptedOpenAI(script) as server, gateway(server, cache=True) as case:
        _, client = await case.start()
        with pytest.raises(openai.BadRequestError):
            await ask(client, temperature=0)
        assert await ask(client, temperature=0) == "2"
        await case.proxy.pause()
        await case.proxy.resume(weight_version=1)
        assert await ask(client, temperature=0) == "3"


async def test_a_new_gateway_reads_the_answers_of_every_run_from_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    texts = []
    async with ScriptedOpenAI([Answer("1"), Answer("2")]) as server:
        for run in (None, "second"):
            store = agl.create_store(url, run=run)
            proxy = agl.LLMProxy(model_list=[entry(server.endpoint)], store=store, cache=True)
            await proxy.start()
            rollout = await store.start_rollout({"task": 1})
            llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
            async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
                texts.append(await ask(client, temperature=0))
            await proxy.stop()
            await store.close()
    assert texts == ["1", "1"]


def agent(task: str, llm: agl.LLM, prompt: agl.PromptTemplate) -> float:
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        messages: Any = [{"role": "user", "content": prompt.format(task=task)}]
        reply = client.chat.completions.create(model=llm.model, messages=messages, temperature=0)
    return float(reply.choices[0].message.content == "good")


def answer(request: RecordedRequest) -> Answer:
    return Answer("good" if "well" in request.body["messages"][0]["content"] else "bad")


async def test_a_repeated_evaluation_makes_no_model_call_and_the_report_says_so(tmp_path: Path) -> None:
    async with ScriptedOpenAI(answer) as server:
        rewards = []
        for number in range(2):
            store = agl.create_store(f"sqlite:///{tmp_path}/agl.db")
            proxy = get_manager().create(
                "gateway", {"name": "gateway", "cache": True, "model_list": [entry(server.endpoint)]}
            )
            trainer = agl.Trainer(
                algorithm="baseline",
                store=store,
                llm_proxy=proxy,
                strategy="shm",
                trackers=[],
                run_dir=tmp_path / f"run-{number}",
                initial_resources={"prompt": "{task} well"},
            )
            run = await asyncio.to_thread(trainer.dev, agent, None, ["add", "sum"])
            rewards.append(run.status)
            own = agl.create_store(f"sqlite:///{tmp_path}/agl.db", run=run.run_id)
            report = (await write_report(own, tmp_path / f"run-{number}")).read_text()
            assert ("cache answered: 2" in report) == (number == 1), report
            await own.close()
            await store.close()
        assert rewards == ["succeeded"] * 2
        assert len(server.requests) == 2
