"""Providers and the dialects that they support, including third-party providers and dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from agentlightning import Component, hookimpl, semconv
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.backends.provider import OpenAICompatible
from agentlightning_plugins.gateway.dialects.dialect import Completion, Dialect
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.plugins.gateway.gateway_setup import HELLO, PROVIDER_KEY, gateway

FULL = Answer("The sum is 3.", reasoning="Add them.", tool_calls=[("add", {"a": 1, "b": 2}), ("add", {})])


async def read_raw(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, bytes, str]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        return response.status, await response.read(), response.content_type


FAILED = {"id": "r", "output": [], "status": "failed", "error": {"message": "overloaded"}}
PASSED = {
    "openai": ("responses", {"input": [{"role": "user", "content": "hi"}], "store": True}),
    "anthropic": ("messages", {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "adaptive"}}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_calls_in_a_dialect_of_the_backend_are_relayed_unchanged(provider: str, stream: bool) -> None:
    path, more = PASSED[provider]
    body = {"model": "m", "stream": stream, **more}
    script = [Answer(FULL.content, FULL.tool_calls, reasoning=FULL.reasoning, extra={"id": "same", "created_at": 1})]
    async with ScriptedOpenAI(script, api_key=PROVIDER_KEY) as server:
        async with gateway(server, provider=provider) as case:
            rollout, client = await case.start()
            direct = await read_raw(f"{server.endpoint}/{path}", body, {"x-api-key": PROVIDER_KEY})
            relayed = await read_raw(f"{client.base_url}{path}", body, {"x-api-key": "the-agents-own-key"})
            span = await case.span(rollout)
        mine, relayed_request = server.requests
    replaced = direct[1].replace(b"scripted-0", b"scripted-1")
    assert relayed == (200, replaced, direct[2])
    assert relayed_request.body == mine.body
    assert relayed_request.path == mine.path
    assert span.attributes["agentlightning.gateway.complete"] is True
    assert span.attributes["gen_ai.provider.name"] == provider
    assert span.attributes["gen_ai.response.id"] == "same"
    assert span.attributes["gen_ai.usage.output_tokens"] == FULL.count_tokens()
    assert semconv.read_finish_reasons(span) == ["tool_calls"]
    (message,) = semconv.read_output_messages(span)
    assert (message["content"], message["reasoning_content"]) == (FULL.content, FULL.reasoning)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == list(FULL.tool_calls)
    assert PROVIDER_KEY not in span.model_dump_json()


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_a_relayed_stream_that_ends_early_is_recorded_as_incomplete(provider: str) -> None:
    path, more = PASSED[provider]
    async with (
        ScriptedOpenAI([Answer("Hello, world", cut_after=6)]) as server,
        gateway(server, provider=provider) as case,
    ):
        rollout, client = await case.start()
        _, text, _ = await read_raw(f"{client.base_url}{path}", {"model": "m", "stream": True, **more}, {})
        span = await case.span(rollout)
    assert b"event: error\n" in text
    assert span.attributes["agentlightning.gateway.complete"] is False
    assert "Hello, world".startswith(semconv.read_output_messages(span)[0]["content"])
    assert semconv.read_output_messages(span)[0]["content"]


@pytest.mark.parametrize(
    ("provider", "path", "event"),
    [
        ("openai", "responses", {"type": "error", "code": "x", "message": "overloaded", "sequence_number": 1}),
        ("openai", "responses", {"type": "response.failed", "response": FAILED}),
        ("anthropic", "messages", {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}}),
    ],
)
async def test_an_error_event_in_a_relayed_stream_is_recorded(provider: str, path: str, event: dict[str, Any]) -> None:
    sent = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
    async with (
        ScriptedOpenAI([Answer(body=sent, content_type="text/event-stream")]) as server,
        gateway(server, provider=provider) as case,
    ):
        rollout, client = await case.start()
        _, text, _ = await read_raw(f"{client.base_url}{path}", {"model": "m", "stream": True, "input": "x"}, {})
        span = await case.span(rollout)
    assert text == sent
    assert (span.status.status_code, span.status.description) == ("ERROR", "overloaded")
    assert span.attributes["agentlightning.gateway.complete"] is False


async def test_a_failed_response_is_recorded_as_incomplete() -> None:
    script = [Answer(body=json.dumps(FAILED).encode())]
    async with ScriptedOpenAI(script) as server, gateway(server, provider="openai") as case:
        rollout, client = await case.start()
        answer = await client.responses.create(model="m", input="x")
        span = await case.span(rollout)
    assert answer.status == "failed"
    assert (span.status.status_code, span.status.description) == ("ERROR", "overloaded")
    assert span.attributes["agentlightning.gateway.complete"] is False


async def test_url_queries_and_token_counting_are_relayed() -> None:
    paths: list[str] = []

    def script(request: RecordedRequest) -> Answer:
        paths.append(request.path)
        return Answer()

    async with ScriptedOpenAI(script) as server, gateway(server, provider="anthropic") as case:
        _, client = await case.start()
        messages = await case.anthropic_client(client)
        count = await messages.messages.count_tokens(model="m", messages=HELLO)
        assert count.input_tokens == len(json.dumps(HELLO))
        query = {"beta": "true"}
        await messages.messages.create(model="m", max_tokens=9, messages=HELLO, extra_query=query)
    assert paths == ["/v1/messages?beta=true"]


async def test_an_error_event_in_a_chat_stream_is_recorded() -> None:
    sent = b'data: {"error":{"message":"overloaded"}}\n\ndata: [DONE]\n\n'
    async with ScriptedOpenAI([Answer(body=sent, content_type="text/event-stream")]) as server, gateway(server) as case:
        rollout, client = await case.start()
        with pytest.raises(openai.APIError, match="overloaded"):
            async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
                pass
        span = await case.span(rollout)
    assert "overloaded" in (span.status.description or "")
    assert span.attributes["agentlightning.gateway.complete"] is False


async def test_embeddings_are_relayed_unchanged_and_are_not_training_data() -> None:
    body = {"model": "m", "input": ["ab", "c"], "dimensions": 2}
    async with ScriptedOpenAI() as server, gateway(server) as case:
        rollout, client = await case.start()
        direct = await read_raw(f"{server.endpoint}/embeddings", body, {})
        relayed = await read_raw(f"{client.base_url}embeddings", body, {})
        vectors = await client.embeddings.create(model="m", input=["ab", "c"])
        spans = await case.spans(rollout)
    assert relayed == direct
    assert [item.embedding for item in vectors.data] == [[2.0, 97.0], [1.0, 99.0]]
    assert server.requests[0].body == server.requests[1].body
    span = spans[0]
    assert (span.name, span.attributes["gen_ai.operation.name"]) == ("embeddings", "embeddings")
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert [message["content"] for message in semconv.read_input_messages(span)] == ["ab", "c"]
    assert not semconv.is_llm_call(span)


async def test_a_chat_answer_is_relayed_byte_for_byte_if_the_agent_requested_the_token_data_itself() -> None:
    text = '{ "id":"x", "choices":[{"index":0,"message":{"role":"assistant","content":"h\\u00e9","reasoning":"r"},'
    text += '"logprobs":{"content":[{"token":"h","logprob":-1.50}]},"finish_reason":"stop"}],"novel":1e2}'
    body = {"model": "m", "messages": HELLO, "logprobs": True, "return_token_ids": True, "modalities": ["text"]}
    async with ScriptedOpenAI([Answer(body=text.encode())]) as server, gateway(server) as case:
        rollout, client = await case.start()
        _, relayed, _ = await read_raw(f"{client.base_url}chat/completions", body, {})
        assert relayed == text.encode()
        assert semconv.read_output_messages(await case.span(rollout))[0]["content"] == "hé"


@pytest.mark.parametrize(
    ("given", "provider", "url"),
    [
        ({"model": "x", "endpoint": "http://h/v1"}, "openai", "http://h/v1/chat/completions"),
        ({"model": "x", "endpoint": "https://api.anthropic.com"}, "anthropic", "https://api.anthropic.com/v1/messages"),
        ({"model": "x", "provider": "anthropic"}, "anthropic", "https://api.anthropic.com/v1/messages"),
        ({"model": "x", "provider": "openai"}, "openai", "https://api.openai.com/v1/responses"),
        ({"model": "x", "provider": "anthropic", "endpoint": "http://h/v1/"}, "anthropic", "http://h/v1/messages"),
        ({"litellm_params": {"model": "anthropic/x"}}, "anthropic", "https://api.anthropic.com/v1/messages"),
        ({"litellm_params": {"model": "openai/x"}}, "openai", "https://api.openai.com/v1/responses"),
        ({"litellm_params": {"model": "hosted_vllm/x", "api_base": "http://h/v1"}}, "vllm", "http://h/v1/chat/completions"),
    ],
)  # fmt: skip
def test_a_model_entry_determines_its_provider_and_url(given: dict[str, Any], provider: str, url: str) -> None:
    ((backend,),) = ModelTable([given | {"model_name": "m"}])._backends.values()
    assert (backend.provider.name, backend.served_model) == (provider, "x")
    assert str(backend.url(url.rpartition("/v1/")[2])) == url


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no provider named 'anthropik'. Did you mean 'anthropic'"):
        ModelTable([{"model": "x", "provider": "anthropik"}])


async def test_a_dialect_that_cannot_be_translated_is_refused() -> None:
    async with ScriptedOpenAI() as server, gateway(server, provider="anthropic") as case:
        _, client = await case.start()
        with pytest.raises(openai.BadRequestError, match=r"does not speak openai-chat, only anthropic-count"):
            await client.chat.completions.create(model="m", messages=HELLO)


class Shouting(Dialect):
    """A third-party dialect."""

    name = "acme-shout"
    routes = ("acme/shout",)
    path = "shout"
    span_name = "acme.shout"
    operation = "text_completion"

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "parts": [{"type": "text", "content": body["say"]}]}]

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        completion.choice(0).text = answer["shouted"]
        completion.choice(0).finish_reason = "stop"

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return {"oh no": message}


class Acme(OpenAICompatible):
    """A third-party provider."""

    name = "acme"
    dialects = frozenset({"acme-shout"})

    def url(self, endpoint: str, path: str) -> str:
        return f"{endpoint}/chat/completions"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {"X-Acme": api_key}


@pytest.fixture
async def acme(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Registers a plugin that offers both for one test."""

    @hookimpl
    def components() -> list[Component]:
        here = "tests.plugins.gateway.test_gateway_providers"
        return [Component("dialect", "acme-shout", f"{here}:Shouting"), Component("provider", "acme", f"{here}:Acme")]

    get_manager.cache_clear()
    get_manager().register(SimpleNamespace(components=components), "acme")
    yield
    get_manager.cache_clear()


async def test_a_third_party_can_add_a_dialect_and_a_provider(acme: None) -> None:
    script = [Answer(body=b'{"shouted": "HELLO"}')]
    async with ScriptedOpenAI(script) as server, gateway(server, provider="acme") as case:
        rollout, client = await case.start()
        url = str(client.base_url).replace("/v1/", "/acme/shout")
        said = await read_raw(url, {"model": "m", "say": "hello"}, {})
        refused = await read_raw(url, {"model": "other", "say": "hello"}, {})
        span, _ = await case.spans(rollout)
    assert said[:2] == (200, b'{"shouted": "HELLO"}')
    assert (refused[0], json.loads(refused[1])) == (404, {"oh no": "no model 'other'; models: m"})
    assert server.requests[0].headers["X-Acme"] == PROVIDER_KEY
    assert (span.name, span.attributes["gen_ai.provider.name"]) == ("acme.shout", "acme")
    assert semconv.read_output_messages(span)[0]["content"] == "HELLO"
