"""Relaying and recording, with the real ``openai`` client."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from openai import OpenAI

from agentlightning import semconv
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.shared.scripted_model.server import (
    EOS,
    Answer,
    ScriptedOpenAI,
    encode,
    logprob,
    render_prompt,
)
from tests.http_site import serving
from tests.plugins.gateway.gateway_setup import ADD, HELLO, PROVIDER_KEY, entry, gateway, stream_reader
from tests.waiting import until

PROMPT_IDS = encode(render_prompt({"messages": HELLO}))


def token_attributes(text: str) -> dict[str, Any]:
    ids = [*encode(text), EOS]
    return {"prompt_token_ids": PROMPT_IDS, "response_token_ids": ids, "logprobs": [logprob(token) for token in ids]}


def shared(span: Span, expected: dict[str, Any]) -> dict[str, Any]:
    return {name: span.attributes.get(name) for name in expected}


async def test_a_call_is_recorded_with_its_tokens_for_its_attempt() -> None:
    async with ScriptedOpenAI([Answer("Hello!", extra={"weight_version": 7})]) as server, gateway(server) as case:
        rollout, client = await case.start()
        before = time.time()
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, temperature=0.5, max_tokens=9, stop="x"
        )
        span = await case.span(rollout)
    expected = token_attributes("Hello!") | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stop_sequences": ["x"],
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(PROMPT_IDS),
        "gen_ai.usage.output_tokens": 7,
        "agentlightning.weight_version": 7,
        "agentlightning.gateway.complete": True,
    }
    assert shared(span, expected) == expected
    assert semconv.read_input_messages(span) == HELLO
    assert semconv.read_output_messages(span) == [{"role": "assistant", "content": "Hello!"}]
    assert (span.name, span.status.status_code, span.sequence_id) == ("chat.completions", "OK", 1)
    assert span.start_time is not None
    assert span.end_time is not None
    assert before <= span.start_time < span.end_time <= time.time()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"return_token_ids": True, "logprobs": False}])
async def test_the_agent_gets_the_same_answer_as_without_the_gateway(stream: bool, asked: dict[str, bool]) -> None:
    extra = {"id": "same", "created": 1, "novel": {"x": [1.5, None, "é"]}}
    script = [Answer("text", tool_calls=[("add", {"a": 1}), ("add", {"b": 2})], extra=extra, reasoning="Hm.")]
    request: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": [ADD], "n": 2, "stream": stream}
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        rollout, client = await case.start()
        seen = []
        async with aiohttp.ClientSession() as session:
            for base_url in (f"{server.endpoint}/", client.base_url):
                async with session.post(f"{base_url}chat/completions", json=request | asked) as response:
                    text = (await response.text()).replace("scripted-1", "scripted-0")
                events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
                seen.append([event if event == "[DONE]" else json.loads(event) for event in events])
        assert seen[0] == seen[1]
        assert semconv.read_token_data(await case.span(rollout), 1) is not None


async def test_the_gateway_adds_only_the_fields_that_request_token_data() -> None:
    image = b'{"type":"image_url",  "image_url":{"url":"data:image/png;base64,AAAA"}}'
    body = (
        b'{ "model":"m",  "messages":[{"role":"user","content":"h\\u00e9"}, {"role":"user", "content": [%b]}],'
        b' "seed": 1e2, "response_format":{ "type":"json_object"}, "top_p" :1, "vendor": [1.50]}'
    ) % image
    async with ScriptedOpenAI() as server, gateway(server) as case:
        _, client = await case.start()
        url = f"{client.base_url}chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=body) as response:
            assert response.status == 200
        sent = server.requests[0].body
    sent_by_agent = json.loads(body)
    assert sent_by_agent.pop("vendor"), "a field that belongs to no API is not passed on"
    assert sent == sent_by_agent | {"return_token_ids": True, "logprobs": True}
    assert list(sent)[: len(sent_by_agent)] == list(sent_by_agent), "the fields keep their order"


async def test_a_backend_gets_each_field_of_a_request_once() -> None:
    body = b'{"model":"m","messages":[{"role":"user","role":"user","content":"hi"}],"n":7,"n":1,"n\\u0000":2}'
    async with ScriptedOpenAI() as server, gateway(server) as case:
        for url in ((await case.start())[1].base_url, f"{case.proxy.endpoint}/"):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}chat/completions", data=body) as response,
            ):
                assert response.status == 200
        for request in server.requests:
            assert request.raw.count(b'"n"') == request.raw.count(b'"role"') == 1
            assert request.body["n"] == 1
            assert "n\0" not in request.body


async def test_a_backend_gets_only_known_headers_and_url_parameters() -> None:
    strange = ("X-HTTP-Method-Override", "X-Goog-Api-Key", "X-Forwarded-For", "OpenAI-Organization", "Content-Encoding")
    known = {"anthropic-beta": "b", "openai-beta": "assistants=v2", "user-agent": "agent/1"}
    async with ScriptedOpenAI() as server, gateway(server) as case:
        _, client = await case.start()
        async with aiohttp.ClientSession() as session:
            url = f"{client.base_url}chat/completions?key=stolen&beta=true&api-version=2"
            headers = dict.fromkeys(strange[:-1], "agent") | known
            async with session.post(url, json={"model": "m", "messages": HELLO}, headers=headers) as response:
                assert response.status == 200
        (request,) = server.requests
        assert not set(strange) & set(request.headers)
        assert {name: request.headers[name] for name in known} == known
        assert request.path.partition("?")[2] in ("", "beta=true&api-version=2")


async def test_calls_without_an_attempt_are_relayed_unchanged_and_not_recorded() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        client = case.client(case.proxy.endpoint)
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        chunks = [c async for c in await client.chat.completions.create(model="m", messages=HELLO, stream=True)]
        await case.proxy.flush()
        assert answer.choices[0].message.content == "ok"
        assert chunks[0].choices[0].delta.content == "ok"
        assert [set(request.body) for request in server.requests] == [
            {"model", "messages"},
            {"model", "messages", "stream"},
        ]
        assert (await case.store.statistics())["spans"] == 0


async def test_a_stream_is_relayed_chunk_by_chunk_and_recorded_like_a_whole_answer() -> None:
    script = [Answer("Hello, world", chunk_delay_s=3600), Answer("Hello, world", extra={"weight_version": 3})]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        _, impatient = await case.start()
        async with await impatient.chat.completions.create(model="m", messages=HELLO, stream=True) as stream:
            assert (await anext(aiter(stream))).choices[0].delta.content, "the next one is sent in an hour"
        rollout, client = await case.start()
        text, last = "", None
        async for chunk in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
            last = chunk
        span = await case.span(rollout)
    assert text == "Hello, world"
    assert last is not None
    expected = token_attributes("Hello, world") | {
        "gen_ai.response.id": last.id,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(PROMPT_IDS),
        "gen_ai.usage.output_tokens": 13,
        "agentlightning.weight_version": 3,
        "agentlightning.gateway.complete": True,
    }
    assert shared(span, expected) == expected
    assert semconv.read_output_messages(span)[0]["content"] == "Hello, world"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_stream_is_read_correctly_wherever_it_is_split(newline: bytes) -> None:
    def chunk(token: int) -> bytes:
        choice = {"index": 0, "delta": {"content": chr(token)}, "token_ids": [token], "finish_reason": "stop"}
        return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + newline * 2

    stream = (
        b": a comment" + newline * 2 + chunk(65) + b"event: m" + newline + chunk(66) + b"data: [DONE]" + newline * 2
    )
    seen = set()
    for cut in range(len(stream)):
        call, reader = stream_reader(CHAT, {})
        seen.add(reader.feed(stream[:cut]) + reader.feed(stream[cut:]) + reader.close(None))
        assert call.is_complete
        assert (call.completion.choices[0].text, call.completion.choices[0].token_ids) == ("AB", [65, 66])
    (shown,) = seen
    assert b"token_ids" not in shown
    assert shown.count(b"data: ") == 3
    assert b"event: m" in shown


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_recorded_exactly(stream: bool) -> None:
    script = [Answer("Let me see.", tool_calls=[("add", {"a": 1, "b": "é"}), ("add", {})])]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        rollout, client = await case.start()
        answer: Any = await client.chat.completions.create(model="m", messages=HELLO, tools=[ADD], stream=stream)
        if stream:
            async for _ in answer:
                pass
        span = await case.span(rollout)
    (message,) = semconv.read_output_messages(span)
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": json.dumps({"a": 1, "b": "é"})},
        {"name": "add", "arguments": "{}"},
    ]
    assert message["tool_calls"][1]["id"] == "call-scripted-0-0-1"
    assert semconv.read_tools(span) == [ADD]
    assert semconv.read_finish_reasons(span) == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_all_of_n_choices_are_recorded(stream: bool) -> None:
    async with ScriptedOpenAI([Answer("Hi")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        answer: Any = await client.chat.completions.create(model="m", messages=HELLO, n=3, stream=stream)
        if stream:
            async for _ in answer:
                pass
        span = await case.span(rollout)
    for index, text in enumerate(["Hi", "Hi #1", "Hi #2"]):
        data = semconv.read_token_data(span, index)
        ids = [*encode(text), EOS]
        assert data == (PROMPT_IDS, ids, [logprob(token) for token in ids])
    assert [message["content"] for message in semconv.read_output_messages(span)] == ["Hi", "Hi #1", "Hi #2"]
    assert semconv.read_finish_reasons(span) == ["stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_the_completions_api_are_recorded_too(stream: bool) -> None:
    async with ScriptedOpenAI([Answer("lo")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        answer: Any = await client.completions.create(model="m", prompt="Hel", stream=stream)
        if stream:
            chunks = [chunk async for chunk in answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "lo"
            assert all(chunk.choices[0].logprobs is None for chunk in chunks)
        else:
            assert answer.choices[0].text == "lo"
            assert answer.choices[0].logprobs is None
            assert not hasattr(answer.choices[0], "token_ids")
        span = await case.span(rollout)
    ids = [*encode("lo"), EOS]
    assert semconv.read_token_data(span) == (encode("Hel"), ids, [logprob(token) for token in ids])
    assert (span.name, span.attributes["gen_ai.operation.name"]) == ("completions", "text_completion")
    assert semconv.read_input_messages(span) == [{"role": "user", "content": "Hel"}]


async def test_the_gateways_span_is_a_child_of_the_agents_span() -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        for header in (f"00-{trace}-{parent}-01", "00-nonsense", f"00-{'0' * 32}-{parent}-01"):
            await client.chat.completions.create(model="m", messages=HELLO, extra_headers={"traceparent": header})
        ours, *others = await case.spans(rollout)
        assert (ours.trace_id, ours.parent_id) == (trace, parent)
        assert server.requests[0].headers["traceparent"] == f"00-{trace}-{ours.span_id}-01"
        assert all(span.parent_id is None and span.trace_id != trace for span in others)
        assert len({span.trace_id for span in others}) == 2


async def test_the_weight_version_may_come_in_a_header() -> None:
    script = [Answer(headers={"x-weight-version": "12"})]
    async with ScriptedOpenAI(script) as server, gateway(server) as case:
        rollout, client = await case.start()
        await client.chat.completions.create(model="m", messages=HELLO)
        async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
            pass
        assert [span.attributes["agentlightning.weight_version"] for span in await case.spans(rollout)] == [12, 12]


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_tokens_and_tool_calls_that_are_left_as_text_are_recorded(stream: bool) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        kind = "delta" if stream else "message"
        choice = {"index": 0, kind: {"content": "<tool_call>"}, "finish_reason": "stop", "tool_calls_unparsed": 1}
        choices = [choice, {**choice, "index": 1, "tool_calls_unparsed": 2}]
        body = {"id": "c", "object": "chat.completion", "model": "m", "forced_tokens": 3, "choices": choices}
        if not stream:
            return web.json_response(body)
        events = f"data: {json.dumps({**body, 'object': 'chat.completion.chunk'})}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    async with (
        serving(web.post("/v1/chat/completions", serve)) as url,
        gateway(model_list=[entry(f"{url}/v1")]) as case,
    ):
        rollout, client = await case.start()
        answer = await client.chat.completions.create(model="m", messages=HELLO, stream=stream)
        if stream:
            async for _ in answer:
                pass
        span = await case.span(rollout)
    assert span.attributes["agentlightning.gateway.forced_tokens"] == 3
    assert span.attributes["agentlightning.gateway.tool_calls_unparsed"] == 3


async def test_a_call_is_recorded_as_incomplete_if_the_agent_disconnects_during_the_stream() -> None:
    async with ScriptedOpenAI([Answer("Hello, world", chunk_delay_s=3600)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        await anext(aiter(stream))
        await stream.close()
        span = await case.eventual_span(rollout)
        assert span.attributes["agentlightning.gateway.complete"] is False
        assert span.status.status_code == "ERROR"
        assert "disconnected" in (span.status.description or "")
        assert "Hello, world".startswith(semconv.read_output_messages(span)[0]["content"])


async def test_a_call_is_recorded_as_incomplete_if_the_agent_disconnects_before_the_answer() -> None:
    async with ScriptedOpenAI([Answer(delay_s=30)]) as server, gateway(server) as case:
        rollout, client = await case.start()
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
        await until(lambda: bool(server.requests))
        asking.cancel()
        await asyncio.wait([asking])
        span = await case.eventual_span(rollout)
        assert span.attributes["agentlightning.gateway.complete"] is False
        assert semconv.read_token_data(span) is None


async def test_streamed_and_whole_answers_are_in_the_store_when_flush_returns() -> None:
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        for number in range(1, 6):
            await client.chat.completions.create(model="m", messages=HELLO)
            assert len(await case.spans(rollout)) == 2 * number - 1
            async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
                pass
            assert len(await case.spans(rollout)) == 2 * number


async def test_concurrent_attempts_keep_their_calls_separate() -> None:
    def script(request: Any) -> Answer:
        return Answer(f"to {request.body['messages'][0]['content']}", delay_s=0.01)

    async with ScriptedOpenAI(script) as server, gateway(server) as case:

        async def work() -> AttemptedRollout:
            rollout, client = await case.start()
            for turn in range(2):
                messages: list[Any] = [{"role": "user", "content": f"{rollout.rollout_id} {turn}"}]
                answer = await client.chat.completions.create(model="m", messages=messages)
                assert answer.choices[0].message.content == f"to {rollout.rollout_id} {turn}"
            return rollout

        for rollout in await asyncio.gather(*(work() for _ in range(24))):
            spans = await case.spans(rollout)
            texts = [semconv.read_output_messages(span)[0]["content"] for span in spans]
            assert texts == [f"to {rollout.rollout_id} 0", f"to {rollout.rollout_id} 1"]


async def test_the_synchronous_client_works_from_a_thread() -> None:
    async with ScriptedOpenAI([Answer("sync")]) as server, gateway(server) as case:
        rollout, client = await case.start()

        def call() -> list[str]:
            with OpenAI(base_url=client.base_url, api_key="any") as sync:
                whole = sync.chat.completions.create(model="m", messages=HELLO)
                chunks = sync.chat.completions.create(model="m", messages=HELLO, stream=True)
                return [whole.choices[0].message.content or "", *(c.choices[0].delta.content or "" for c in chunks)]

        assert await asyncio.to_thread(call) == ["sync", "sync", ""]
        assert len(await case.spans(rollout)) == 2


async def test_an_endpoint_without_token_ids_is_reported_once_per_model(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedOpenAI(token_ids="ignore") as server, gateway(server) as case:
        rollout, client = await case.start()
        with caplog.at_level(logging.WARNING, "agentlightning"):
            for _ in range(3):
                await client.chat.completions.create(model="m", messages=HELLO)
            spans = await case.spans(rollout)
    (record,) = caplog.records
    assert "'m'" in record.getMessage()
    assert "return_token_ids" in record.getMessage()
    assert all("response_token_ids" not in span.attributes for span in spans)
    assert all(span.attributes["agentlightning.gateway.complete"] for span in spans)


async def test_fields_that_an_endpoint_refuses_are_not_sent_to_it_again() -> None:
    async with ScriptedOpenAI(token_ids="refuse") as server, gateway(server) as case:
        rollout, client = await case.start()
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=HELLO)
        assert ["return_token_ids" in request.body for request in server.requests] == [True, False, False]
        assert all("logprobs" in span.attributes for span in await case.spans(rollout))


async def test_fields_that_an_endpoint_refuses_one_by_one_are_not_sent_to_it_again() -> None:
    async with ScriptedOpenAI(token_ids="refuse", refused=["logprobs"]) as server, gateway(server) as case:
        _, client = await case.start()
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=HELLO)
    names = ("return_token_ids", "logprobs")
    sent = [[name for name in names if name in request.body] for request in server.requests]
    assert sent == [["return_token_ids", "logprobs"], ["logprobs"], [], []]


async def test_a_backend_without_a_key_does_not_get_the_agents_key() -> None:
    async with ScriptedOpenAI() as server, gateway(model_list=[{"model": "m", "endpoint": server.endpoint}]) as case:
        _, client = await case.start()
        secrets = {"x-api-key": "the-agents-own-key", "Cookie": "session=the-agents-own-key"}
        kept = {"x-request-id": "kept"}
        await client.chat.completions.create(model="m", messages=HELLO, extra_headers=secrets | kept)
        headers = server.requests[0].headers
        assert "the-agents-own-key" not in str(headers)
        assert headers["x-request-id"] == "kept"


async def test_the_agent_does_not_get_the_providers_key_nor_the_provider_the_agents_key() -> None:
    def script(request: Any) -> Answer:
        failed = request.body["messages"][0]["content"] == "fail"
        return Answer(status=401, error=f"bad key {PROVIDER_KEY}") if failed else Answer()

    async with ScriptedOpenAI(script, api_key=PROVIDER_KEY) as server, gateway(server) as case:
        rollout, client = await case.start()
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "fail"}])
        answers = [raw.http_response, caught.value.response]
        seen_by_agent = "".join(f"{answer.headers} {answer.text}" for answer in answers)
        seen_by_backend = "".join(f"{request.headers} {request.raw!r}" for request in server.requests)
        spans = "".join(span.model_dump_json() for span in await case.spans(rollout))
    assert "bad key ***" in seen_by_agent
    assert "bad key ***" in spans
    assert PROVIDER_KEY in seen_by_backend
    assert PROVIDER_KEY not in seen_by_agent + spans
    assert "the-agents-own-key" not in seen_by_backend + spans
