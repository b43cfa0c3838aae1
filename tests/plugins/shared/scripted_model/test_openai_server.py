"""The scripted model server that plugin authors test with, seen through the real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from agentlightning_plugins.shared.scripted_model.server import (
    EOS,
    Answer,
    ScriptedOpenAI,
    decode,
    encode,
    logprob,
    render_prompt,
)

ASK: list[Any] = [{"role": "user", "content": "héllo"}]


def client_of(server: ScriptedOpenAI) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.endpoint, api_key="key", max_retries=0)


async def test_answers_come_in_order_and_the_last_is_repeated() -> None:
    async with ScriptedOpenAI([Answer("one"), Answer("two")]) as server, client_of(server) as client:
        texts = [
            (await client.chat.completions.create(model="any", messages=ASK)).choices[0].message.content
            for _ in range(3)
        ]
    assert texts == ["one", "two", "two"]
    assert server.requests[2].body == {"model": "any", "messages": ASK}
    assert server.requests[2].path == "/v1/chat/completions"


async def test_requests_whose_bodies_arrive_concurrently_get_separate_answers_and_ids() -> None:
    body, other_is_answered = json.dumps({"model": "m", "messages": ASK}).encode(), asyncio.Event()

    async def arrive_slowly() -> AsyncIterator[bytes]:
        yield body[:5]
        await other_is_answered.wait()
        yield body[5:]

    async with ScriptedOpenAI([Answer("one"), Answer("two")]) as server, httpx.AsyncClient() as client:
        url = f"{server.endpoint}/chat/completions"
        slow = asyncio.create_task(client.post(url, content=arrive_slowly()))
        await asyncio.sleep(0.1)  # its handler waits for the rest of the body
        answers = [await client.post(url, content=body)]
        other_is_answered.set()
        answers.append(await slow)
    found = [(answer.json()["id"], answer.json()["choices"][0]["message"]["content"]) for answer in answers]
    assert found == [("scripted-0", "one"), ("scripted-1", "two")]


async def test_tokens_and_logprobs_are_returned_on_request_and_agree_with_the_usage() -> None:
    extra: Any = {"return_token_ids": True}
    async with ScriptedOpenAI([Answer("é!")]) as server, client_of(server) as client:
        answer: Any = await client.chat.completions.create(
            model="m", messages=ASK, logprobs=True, n=2, extra_body=extra
        )
        plain: Any = await client.chat.completions.create(model="m", messages=ASK)
    assert decode(answer.prompt_token_ids) == render_prompt({"messages": ASK})
    assert [choice.token_ids for choice in answer.choices] == [[*encode("é!"), EOS], [*encode("é! #1"), EOS]]
    assert [item.logprob for item in answer.choices[0].logprobs.content] == [logprob(t) for t in [*encode("é!"), EOS]]
    assert answer.usage.completion_tokens == 4 + 7
    assert plain.choices[0].logprobs is None
    assert not hasattr(plain, "prompt_token_ids")


async def test_a_prompt_begins_with_the_tokens_of_the_conversation_so_far() -> None:
    script = [Answer("I add.", tool_calls=[("add", {"a": 1}), ("add", "{}")], reasoning="Hm."), Answer("3")]
    ask: Any = {"model": "m", "logprobs": True, "extra_body": {"return_token_ids": True}}
    messages: list[Any] = list(ASK)
    known: list[int] = []
    async with ScriptedOpenAI(script) as server, client_of(server) as client:
        for _ in range(3):
            answer: Any = await client.chat.completions.create(messages=messages, **ask)
            assert answer.prompt_token_ids[: len(known)] == known
            message = answer.choices[0].message
            known = [*answer.prompt_token_ids, *answer.choices[0].token_ids]
            messages.append(message.to_dict())
            results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls or ()]
            messages += results or ASK
    assert decode(known).count("<tool_call>add") == 2
    assert decode(known).count("<tool>1") == 2


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    script = [Answer("some text", tool_calls=[("f", {"x": [1, 2, 3]})])]
    async with ScriptedOpenAI(script) as server, client_of(server) as client:
        whole = await client.chat.completions.create(model="m", messages=ASK)
        options: Any = {"include_usage": True}
        async with client.chat.completions.stream(model="m", messages=ASK, stream_options=options) as stream:
            final = await stream.get_final_completion()
    assert final.choices[0].message.content == "some text"
    assert final.choices[0].message.tool_calls
    assert whole.choices[0].message.tool_calls
    streamed: Any = final.choices[0].message.tool_calls[0]
    sent: Any = whole.choices[0].message.tool_calls[0]
    assert streamed.function.name == sent.function.name == "f"
    assert streamed.function.arguments == sent.function.arguments == '{"x": [1, 2, 3]}'
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert final.usage == whole.usage


async def test_the_scripted_server_gives_errors_delays_and_cut_answers() -> None:
    script = [
        Answer(status=429, error="slow down", headers={"Retry-After": "1"}),
        Answer(delay_s=0.2),
        Answer(cut_after=0),
        Answer("half", cut_after=1),
    ]
    async with ScriptedOpenAI(script, api_key="key") as server, client_of(server) as client:
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await client.chat.completions.create(model="m", messages=ASK)
        clock = asyncio.get_running_loop()
        start = clock.time()
        assert (await client.chat.completions.create(model="m", messages=ASK)).choices
        assert clock.time() >= start + 0.2, "and a busy machine takes longer"
        for _ in range(2):
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").chat.completions.create(model="m", messages=ASK)


FULL = Answer("some text", [("f", {"x": [1, 2, 3]})], reasoning="hm")


async def test_a_responses_stream_adds_up_to_the_whole_answer() -> None:
    async with ScriptedOpenAI([FULL]) as server, client_of(server) as client:
        whole = await client.responses.create(model="m", input="hi")
        async with client.responses.stream(model="m", input="hi") as stream:
            final = await stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == final.output_text == "some text"
    assert whole.usage == final.usage
    assert whole.usage
    assert (
        whole.usage.output_tokens == FULL.count_tokens() == len(encode('hmsome text<tool_call>f{"x": [1, 2, 3]}')) + 1
    )
    assert server.requests[0].path == "/v1/responses"


async def test_a_messages_stream_adds_up_to_the_whole_answer() -> None:
    from anthropic import AsyncAnthropic, AuthenticationError, RateLimitError

    script = [FULL, FULL, Answer(status=429, error="slow down")]
    ask: Any = {"model": "m", "max_tokens": 9, "messages": ASK}
    async with ScriptedOpenAI(script, api_key="key") as server:
        root = server.endpoint.removesuffix("/v1")
        async with AsyncAnthropic(base_url=root, api_key="key", max_retries=0) as client:
            whole = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                final = await stream.get_final_message()
            with pytest.raises(RateLimitError, match="slow down"):
                await client.messages.create(**ask)
            count = await client.messages.count_tokens(model="m", messages=ASK)
            with pytest.raises(AuthenticationError):
                await client.with_options(api_key="other").messages.create(**ask)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert [block.to_dict() for block in final.content[:2]] == [block.to_dict() for block in whole.content[:2]]
    assert whole.content[2].to_dict()["input"] == final.content[2].to_dict()["input"] == {"x": [1, 2, 3]}
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert whole.usage.input_tokens == count.input_tokens


async def test_embeddings_and_reasoning_are_scripted_too() -> None:
    async with ScriptedOpenAI([FULL]) as server, client_of(server) as client:
        vectors = await client.embeddings.create(model="m", input=["ab", "c"])
        chat: Any = await client.chat.completions.create(model="m", messages=ASK)
    assert [item.embedding for item in vectors.data] == [[2.0, 97.0], [1.0, 99.0]]
    assert chat.choices[0].message.reasoning_content == "hm"


async def test_tool_arguments_that_are_text_are_sent_unchanged_by_every_api() -> None:
    texts = ['{"a":1}', "{bad"]
    script = [Answer(tool_calls=[("add", text) for text in texts])]
    async with ScriptedOpenAI(script) as server, client_of(server) as client:
        chat: Any = await client.chat.completions.create(model="m", messages=ASK)
        assert [call.function.arguments for call in chat.choices[0].message.tool_calls] == texts
        response: Any = await client.responses.create(model="m", input="add")
        assert [item.arguments for item in response.output] == texts
        async with httpx.AsyncClient(base_url=server.endpoint) as plain:
            whole = (await plain.post("/messages", json={"model": "m", "messages": ASK})).json()
            streamed = (await plain.post("/messages", json={"model": "m", "messages": ASK, "stream": True})).text
    assert [block["input"] for block in whole["content"]] == [{"a": 1}, "{bad"]
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == "".join(texts)
