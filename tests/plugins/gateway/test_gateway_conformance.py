"""The conformance tests of dialects and providers: our own pass, and those with a planted mistake fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import aiohttp
import pytest

from agentlightning.plugin.registry import get_manager
from agentlightning.testing.dialect import DialectConformance
from agentlightning.testing.provider import ProviderConformance
from agentlightning_plugins.gateway.backends.provider import OpenAICompatible
from agentlightning_plugins.gateway.dialects.dialect import Completion
from agentlightning_plugins.gateway.dialects.openai import ChatCompletions
from tests.planted import assert_each_test_finds_one, assert_found

USER = {"role": "user", "content": "hi"}


class TestChat(DialectConformance):
    example_request: ClassVar = {"model": "m", "messages": [USER], "stream": True, "temperature": 0.5}
    example_answer: ClassVar = {
        "id": "r",
        "model": "m",
        "prompt_token_ids": [1],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "token_ids": [2],
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }
    example_chunks: ClassVar = [
        {"id": "r", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "token_ids": [2]}]},
        {"id": "r", "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
        {"id": "r", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    ]
    says = "Hello"

    @pytest.fixture
    def dialect(self) -> Any:
        return get_manager().create("dialect", "openai-chat")


class TestCompletions(DialectConformance):
    example_request: ClassVar = {"model": "m", "prompt": "hi", "logprobs": 0}
    example_answer: ClassVar = {"id": "r", "choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}]}
    example_chunks: ClassVar = [
        {"id": "r", "choices": [{"index": 0, "text": "Hel"}]},
        {"id": "r", "choices": [{"index": 0, "text": "lo", "finish_reason": "stop"}]},
    ]
    says = "Hello"

    @pytest.fixture
    def dialect(self) -> Any:
        return get_manager().create("dialect", "openai-completions")


class TestResponses(DialectConformance):
    example_request: ClassVar = {"model": "m", "input": [USER], "instructions": "Be kind."}
    example_answer: ClassVar = {
        "id": "r",
        "status": "completed",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}],
    }
    example_chunks: ClassVar = [
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.output_text.delta", "delta": "Hello"},
        {"type": "response.completed", "response": example_answer},
    ]
    says = "Hello"

    @pytest.fixture
    def dialect(self) -> Any:
        return get_manager().create("dialect", "openai-responses")


class TestMessages(DialectConformance):
    example_request: ClassVar = {"model": "m", "messages": [USER], "max_tokens": 9, "system": "Be kind."}
    example_answer: ClassVar = {"id": "r", "content": [{"type": "text", "text": "Hello"}], "stop_reason": "end_turn"}
    example_chunks: ClassVar = [
        {"type": "message_start", "message": {"id": "r"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ]
    says = "Hello"

    @pytest.fixture
    def dialect(self) -> Any:
        return get_manager().create("dialect", "anthropic-messages")


class TestProviders(ProviderConformance):
    @pytest.fixture(params=["openai-compatible", "vllm", "openai", "anthropic"])
    def provider(self, request: pytest.FixtureRequest) -> Any:
        return get_manager().create("provider", request.param)


class StartsWithASlash(ChatCompletions):
    routes = ("/v1/chat/completions",)


class LeavesOutAField(ChatCompletions):
    fields = frozenset({"model", "messages", "stream"})


class ReadsOpenAIsMessages(ChatCompletions):
    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(body["messages"])


class TakesTheMessages(ChatCompletions):
    def read_messages(self, body: Any) -> list[dict[str, Any]]:
        found = super().read_messages(body)
        body["messages"] = []
        return found


class KeepsTheText(ChatCompletions):
    """Keeps a call's state in the dialect, which serves all calls."""

    text = ""

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        super().read_chunk(chunk, completion)
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content", "")
            completion.choice(0).text = self.text


class ForgetsTheReason(ChatCompletions):
    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        super().read_answer(answer, completion)
        completion.choice(0).finish_reason = None


class AssertsItsInput(ChatCompletions):
    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert isinstance(body["messages"], list)
        return super().read_messages(body)


class StripsTooMuch(ChatCompletions):
    def strip(self, answer: dict[str, Any], options: Any) -> bool:
        return answer.pop("usage", None) is not None


class HidesTheReason(ChatCompletions):
    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return {"error": {"code": code}}


DIALECTS = [
    (StartsWithASlash, "test_it_has_names_and_relative_paths", "are relative"),
    (LeavesOutAField, "test_it_has_names_and_relative_paths", "without ['temperature']"),
    (ReadsOpenAIsMessages, "test_a_request_is_read_as_messages", "read_messages returns OpenTelemetry's messages"),
    (TakesTheMessages, "test_a_request_is_read_as_messages", "must not change it"),
    (KeepsTheText, "test_an_answer_is_read_whole_and_as_a_stream", "read_chunk keeps what belongs to a call"),
    (ForgetsTheReason, "test_an_answer_is_read_whole_and_as_a_stream", "read_answer sets the finish reason"),
    (AssertsItsInput, "test_malformed_json_raises_only_errors_that_the_gateway_expects", "read_messages raises"),
    (StripsTooMuch, "test_token_data_that_the_agent_requested_stays", "strip removes only data"),
    (HidesTheReason, "test_an_error_has_the_form_of_the_api", "error_body contains the message"),
]


class Unnamed(OpenAICompatible):
    dialects = frozenset({"openai-chat", "opnai-completions"})


class PutsTheKeyIntoTheUrl(OpenAICompatible):
    def url(self, endpoint: str, path: str) -> str:
        return f"{endpoint}/{path}?key=sk-of-the-provider"


class GoesElsewhere(OpenAICompatible):
    def url(self, endpoint: str, path: str) -> str:
        return f"https://api.example.com/v1/{path}"


class ForgetsTheKey(OpenAICompatible):
    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {"Authorization": "Bearer"}


class KeepsTheKey(OpenAICompatible):
    def authorize(self, api_key: str) -> Mapping[str, str]:
        self.key = api_key
        return super().authorize(api_key)


class FollowsRedirects(OpenAICompatible):
    async def send(self, session: Any, backend: Any, path: str, body: bytes, headers: Any) -> Any:
        return await session.post(backend.url(path), data=body, headers=headers, max_redirects=1)


class RaisesForErrors(OpenAICompatible):
    async def send(self, session: Any, backend: Any, path: str, body: bytes, headers: Any) -> Any:
        answer = await super().send(session, backend, path, body, headers)
        if answer.status >= 400:
            answer.close()
            raise RuntimeError(answer.status)
        return answer


class HasItsOwnErrors(OpenAICompatible):
    async def send(self, session: Any, backend: Any, path: str, body: bytes, headers: Any) -> Any:
        try:
            return await super().send(session, backend, path, body, headers)
        except aiohttp.ClientError:
            raise RuntimeError("it is down") from None


PROVIDERS = [
    (Unnamed, "test_it_names_itself_and_dialects_that_are_installed", "['opnai-completions'] are none"),
    (PutsTheKeyIntoTheUrl, "test_urls_are_below_the_endpoint_and_have_no_key", "a key belongs into a header"),
    (GoesElsewhere, "test_urls_are_below_the_endpoint_and_have_no_key", "url(endpoint, path) is below"),
    (ForgetsTheKey, "test_the_key_is_in_a_header", "authorize(api_key) returns headers with the key"),
    (KeepsTheKey, "test_the_key_is_in_a_header", "a provider keeps no key"),
    (FollowsRedirects, "test_a_request_is_sent_unchanged_and_any_answer_returned", "send returns every answer"),
    (RaisesForErrors, "test_a_request_is_sent_unchanged_and_any_answer_returned", "it raised RuntimeError: 429"),
    (HasItsOwnErrors, "test_a_server_that_is_down_is_an_error_that_is_retried", "it raised RuntimeError"),
]


@pytest.mark.parametrize(("dialect", "test", "message"), DIALECTS, ids=[planted[0].__name__ for planted in DIALECTS])
def test_the_kit_for_dialects_finds_a_planted_mistake(
    dialect: Any, test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(TestChat, test, request, message, dialect=dialect())


@pytest.mark.parametrize(("provider", "test", "message"), PROVIDERS, ids=[planted[0].__name__ for planted in PROVIDERS])
def test_the_kit_for_providers_finds_a_planted_mistake(
    provider: Any, test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(ProviderConformance, test, request, message, provider=provider())


def test_every_test_of_the_kits_finds_a_mistake() -> None:
    assert_each_test_finds_one(DialectConformance, [test for _, test, _ in DIALECTS])
    assert_each_test_finds_one(ProviderConformance, [test for _, test, _ in PROVIDERS])
