"""Anthropic's Messages over Chat Completions: a model that is served by the one answers in the form of the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.chat_part import Part, PartReader, Step
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.dialects.messages_request import to_chat_request
from agentlightning_plugins.gateway.dialects.sse import to_event

_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


class MessagesTranslation:
    """One call of Messages, carried over Chat Completions. Each part of the answer is a content block of its own."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._reader = PartReader()
        self._has_begun = False

    def request(self) -> dict[str, Any]:
        return to_chat_request(self._body)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._reader.read_whole(answer)
        return self._message() | {"usage": self._usage()}

    def feed(self, chunk: dict[str, Any]) -> bytes:
        steps = list(self._reader.feed(chunk))
        begin = b""
        if not self._has_begun:
            self._has_begun = True
            message = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = self._usage() | {"output_tokens": 0}
            begin = _event("message_start", message=message | {"usage": usage})
        return begin + b"".join([_tell(step) for step in steps])

    def close(self) -> bytes:
        last = b"".join([_tell(step) for step in self._reader.close()])
        message = self._message()
        delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        return last + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def _message(self) -> dict[str, Any]:
        reader = self._reader
        reason = _REASONS.get(reader.finish_reason or "", reader.finish_reason)
        stop_sequence = reader.stop_sequence if reason == "end_turn" else None
        if any(part.kind == "refusal" for part in reader.parts):
            reason = "refusal"
        elif stop_sequence is not None:
            reason = "stop_sequence"
        return {
            "id": reader.id,
            "type": "message",
            "role": "assistant",
            "model": reader.model,
            "content": [_block(part) for part in reader.parts],
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reader.usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {
            "input_tokens": self._reader.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.get("completion_tokens") or 0,
        }


class CountTranslation:
    """Counts the tokens of a request by having one token answered: a chat server tells them in its usage."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def request(self) -> dict[str, Any]:
        return to_chat_request({**self._body, "stream": False}) | {"max_tokens": 1}

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"input_tokens": answer["usage"]["prompt_tokens"]}

    def feed(self, chunk: dict[str, Any]) -> bytes:
        raise ValueError("the backend streams an answer that was not to be streamed")

    def close(self) -> bytes:
        return b""


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "tool_call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _parse_arguments(part.text)}
    return {"type": "text", "text": part.text}


def _parse_arguments(text: str) -> dict[str, Any]:
    """What the model wrote; text that is no JSON object is kept under a key, because the API has no other place."""
    try:
        arguments = parse_json(text.encode()) if text else {}
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"unparsed_arguments": text}


def _tell(step: Step) -> bytes:
    part = step.part
    if step.event == "delta":
        kind, key = _DELTAS[part.kind]
        return _event("content_block_delta", index=part.index, delta={"type": kind, key: step.delta})
    if step.event == "stop":
        return _event("content_block_stop", index=part.index)
    blank = _block(Part(part.kind, part.index, call_id=part.call_id, name=part.name))
    return _event("content_block_start", index=part.index, content_block=blank)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\n%b" % (kind.encode(), to_event(dump_json({"type": kind, **fields})))
