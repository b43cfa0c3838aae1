"""The scripted model server that plugin authors test with, seen through the real client."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from agentlightning.testing.openai_server import EOS, Answer, ScriptedOpenAI, decode, encode, logprob, render_prompt

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


async def test_tokens_and_logprobs_are_given_when_asked_for_and_add_up() -> None:
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


async def test_a_stream_is_the_whole_answer_in_pieces() -> None:
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


async def test_it_misbehaves_on_demand() -> None:
    script = [
        Answer(status=429, error="slow down", headers={"Retry-After": "1"}),
        Answer(delay_s=0.2),
        Answer(cut_after=0),
        Answer("half", cut_after=1),
    ]
    async with ScriptedOpenAI(script, api_key="key") as server, client_of(server) as client:
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await client.chat.completions.create(model="m", messages=ASK)
        start = time.monotonic()
        assert (await client.chat.completions.create(model="m", messages=ASK)).choices
        assert time.monotonic() - start >= 0.2
        for _ in range(2):
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="m", messages=ASK)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").chat.completions.create(model="m", messages=ASK)
