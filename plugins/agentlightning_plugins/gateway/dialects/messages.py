"""Anthropic's Messages: relayed to backends that speak it, translated for other backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from agentlightning_plugins.gateway.dialects.dialect import (
    Completion,
    CompletionChoice,
    CompletionToolCall,
    Dialect,
    Translation,
)
from agentlightning_plugins.gateway.dialects.fields import COUNT_FIELDS, MESSAGE_FIELDS
from agentlightning_plugins.gateway.dialects.json_text import dump_json
from agentlightning_plugins.gateway.dialects.messages_translation import (
    CountTranslation,
    MessagesTranslation,
    to_chat_messages,
    to_chat_tools,
)
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.dialects.sse import to_typed_event

_ERRORS: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""OpenAI's finish reason for each stop reason; spans of every dialect contain OpenAI's."""
_TEXTS: Final = {
    "text": ("text", "text"),
    "text_delta": ("text", "text"),
    "thinking": ("reasoning", "thinking"),
    "thinking_delta": ("reasoning", "thinking"),
}
"""For each type of block or delta, the attribute of the choice that it extends, and the key of its text."""


class _Anthropic(Dialect, Protocol):
    """Base of both endpoints."""

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return CHAT.read_messages({"messages": to_chat_messages(body)})

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        return CHAT.read_tools({"tools": to_chat_tools(body)})

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = _ERRORS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        details = {} if code is None else {"details": {"error_code": code}}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        return to_typed_event("error", error=self.error_body(status, message, code)["error"])


class Messages(_Anthropic):
    """Anthropic's Messages."""

    name = "anthropic-messages"
    routes = ("anthropic/v1/messages", "v1/messages")
    path = "messages"
    span_name = "messages"
    operation = "chat"
    fields = MESSAGE_FIELDS

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        _read_head(answer, completion)
        choice = completion.choice(0)
        for position, block in enumerate(answer["content"]):
            _read_block(block, position, choice)
            if block["type"] == "tool_use":
                choice.tool_calls[position].arguments = dump_json(block["input"]).decode()
        choice.finish_reason = _read_reason(answer)

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        match chunk["type"]:
            case "content_block_delta":
                _read_block(chunk["delta"], chunk["index"], completion.choice(0))
            case "content_block_start":
                _read_block(chunk["content_block"], chunk["index"], completion.choice(0))
            case "message_start":
                _read_head(chunk["message"], completion)
            case "message_delta":
                completion.choice(0).finish_reason = _read_reason(chunk["delta"])
                _read_usage(chunk, completion)
            case "message_stop":
                completion.is_ended = True
            case "error":
                completion.error = str(chunk["error"].get("message"))

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        return MessagesTranslation(body)


class CountTokens(_Anthropic):
    """Anthropic's endpoint that counts the tokens of a request."""

    name = "anthropic-count-tokens"
    routes = ("anthropic/v1/messages/count_tokens", "v1/messages/count_tokens")
    path = "messages/count_tokens"
    span_name = "messages.count_tokens"
    operation = "count_tokens"
    fields = COUNT_FIELDS

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        completion.input_tokens = answer["input_tokens"]

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        return CountTranslation(body)


def _read_head(message: Mapping[str, Any], completion: Completion) -> None:
    completion.id, completion.model = message["id"], message.get("model")
    _read_usage(message, completion)


def _read_reason(data: Mapping[str, Any]) -> str | None:
    reason = data.get("stop_reason")
    return _REASONS.get(str(reason), reason)


def _read_usage(data: Mapping[str, Any], completion: Completion) -> None:
    """Reads the usage. Anthropic counts cached tokens separately; OpenTelemetry's input tokens include them."""
    usage = data.get("usage") or {}
    if usage.get("input_tokens") is not None:
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        completion.input_tokens = sum(usage.get(part) or 0 for part in parts)
    if usage.get("output_tokens") is not None:
        completion.output_tokens = usage["output_tokens"]


def _read_block(block: Mapping[str, Any], position: int, choice: CompletionChoice) -> None:
    """Adds a content block or a delta. Skips tools that Anthropic ran itself: the next text contains their results."""
    kind = block["type"]
    if kind in _TEXTS:
        name, key = _TEXTS[kind]
        setattr(choice, name, getattr(choice, name) + block[key])
    elif kind == "tool_use":
        choice.tool_calls[position] = CompletionToolCall(block["id"], block["name"])
    elif kind == "input_json_delta" and position in choice.tool_calls:
        choice.tool_calls[position].arguments += block["partial_json"]
