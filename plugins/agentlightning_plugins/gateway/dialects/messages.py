"""Anthropic's Messages: relayed to backends that speak it, translated to Chat Completions for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from agentlightning_plugins.gateway.dialects.chat_part import (
    Part,
    PartTranslation,
    parse_arguments,
    take,
    to_content,
    to_tool_result,
)
from agentlightning_plugins.gateway.dialects.dialect import (
    Completion,
    CompletionChoice,
    CompletionToolCall,
    Dialect,
    Translation,
    TranslationError,
    to_tool_call,
)
from agentlightning_plugins.gateway.dialects.fields import COUNT_FIELDS, MESSAGE_FIELDS
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.dialects.wire import dump_json, parse_json, to_typed_event

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

    def to_events(self, answer: Mapping[str, Any]) -> bytes:
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        events = [to_typed_event("message_start", message=begun)]
        for index, block in enumerate(answer["content"]):
            blank, deltas = _to_deltas(block)
            events.append(to_typed_event("content_block_start", index=index, content_block={**block, **blank}))
            events += [to_typed_event("content_block_delta", index=index, delta=delta) for delta in deltas]
            events.append(to_typed_event("content_block_stop", index=index))
        delta = {key: answer.get(key) for key in ("stop_reason", "stop_sequence")}
        events.append(to_typed_event("message_delta", delta=delta, usage=answer.get("usage") or {}))
        return b"".join(events) + to_typed_event("message_stop")

    def collect(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        inputs: dict[int, str] = {}
        for chunk in chunks:
            match chunk["type"]:
                case "message_start":
                    message = {**chunk["message"], "content": []}
                case "content_block_start":
                    message["content"].append(dict(chunk["content_block"]))
                case "content_block_delta":
                    block, delta = message["content"][chunk["index"]], chunk["delta"]
                    if delta["type"] == "input_json_delta":
                        inputs[chunk["index"]] = inputs.get(chunk["index"], "") + delta["partial_json"]
                    elif delta["type"] == "citations_delta":
                        block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
                    else:
                        block |= {key: block.get(key, "") + text for key, text in delta.items() if key != "type"}
                case "message_delta":
                    usage = (message.get("usage") or {}) | (chunk.get("usage") or {})
                    message |= {**chunk["delta"], "usage": usage}
                case "error":
                    raise ValueError(str(chunk["error"]))
        if not message["stop_reason"]:
            raise ValueError("the stream ended early")
        for index, text in inputs.items():
            message["content"][index]["input"] = parse_json(text.encode()) if text else {}
        return message

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


def _to_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the keys with which a block begins in a stream, and the deltas that complete it."""
    match block["type"]:
        case "text":
            return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            deltas = [{"type": f"{key}_delta", key: block.get(key) or ""} for key in ("thinking", "signature")]
            return {"thinking": "", "signature": ""}, deltas
        case "tool_use":
            return {"input": {}}, [{"type": "input_json_delta", "partial_json": dump_json(block["input"]).decode()}]
        case _:
            return {}, []


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


_DROPPED: Final = frozenset(
    # Translated below, or specific to Anthropic's own servers.
    "messages system tools tool_choice stop_sequences metadata thinking output_config cache_control container "
    "service_tier inference_geo diagnostics speed context_management mcp_servers".split()
)
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_STOPS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


class MessagesTranslation(PartTranslation):
    """Translates one call of Messages. Each part of the answer becomes a content block."""

    def request(self) -> dict[str, Any]:
        return to_chat_request(self._body)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._read_whole(answer)
        return self._message() | {"usage": self._to_usage()}

    def close(self) -> bytes:
        last, message = self._end_parts(), self._message()
        delta = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        return (
            last + to_typed_event("message_delta", delta=delta, usage=self._to_usage()) + to_typed_event("message_stop")
        )

    def _begin(self) -> bytes:
        message = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
        return to_typed_event("message_start", message=message | {"usage": self._to_usage() | {"output_tokens": 0}})

    def _start(self, part: Part) -> bytes:
        return to_typed_event("content_block_start", index=part.index, content_block=_to_block(part))

    def _add(self, part: Part, text: str, logprobs: Sequence[Any]) -> bytes:
        kind, key = _DELTAS[part.kind]
        return to_typed_event("content_block_delta", index=part.index, delta={"type": kind, key: text})

    def _stop(self, part: Part) -> bytes:
        return to_typed_event("content_block_stop", index=part.index)

    def _message(self) -> dict[str, Any]:
        reason = _STOPS.get(self._finish_reason or "", self._finish_reason)
        if reason == "end_turn" and any(part.kind == "tool_call" for part in self._parts):
            reason = "tool_use"  # some servers end tool calls with "stop"
        stop_sequence = self._stop_sequence if reason == "end_turn" else None
        if any(part.kind == "refusal" for part in self._parts):
            reason = "refusal"
        elif stop_sequence is not None:
            reason = "stop_sequence"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_to_block(part) for part in self._parts],
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
        }

    def _to_usage(self) -> dict[str, Any]:
        usage = self._usage
        cached = min((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, self._prompt_tokens)
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.get("completion_tokens") or 0,
        }


class CountTranslation(MessagesTranslation):
    """Counts the tokens of a request: requests one token from a chat server and reads the usage in its answer."""

    def request(self) -> dict[str, Any]:
        return to_chat_request({**self._body, "stream": False}) | {"max_tokens": 1}

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"input_tokens": answer["usage"]["prompt_tokens"]}


def to_chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translates a request; raises TranslationError if it needs Anthropic's servers."""
    if body.get("thread"):  # Anthropic's client sends the whole conversation after an error with this text and code
        message = "'thread' needs a server that keeps conversations: send all messages with each request"
        raise TranslationError(message, "thread_unsupported_request")
    for tool in body.get("tools") or ():
        if "input_schema" not in tool:
            raise TranslationError(
                f"tools of type {tool.get('type')!r} are Anthropic's own, and the model behind this gateway is served "
                "by Chat Completions: give tools with an 'input_schema'"
            )
    chat: dict[str, Any] = {key: value for key, value in body.items() if key not in _DROPPED}
    chat["messages"] = to_chat_messages(body)
    if body.get("tools"):
        chat["tools"] = to_chat_tools(body)
    choice, output = body.get("tool_choice") or {}, body.get("output_config") or {}
    return chat | take(
        stop=body.get("stop_sequences"),
        user=(body.get("metadata") or {}).get("user_id"),
        tool_choice=_to_tool_choice(choice),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        response_format=_to_format(output.get("format")),
        reasoning_effort=output.get("effort"),
        stream_options={"include_usage": True} if body.get("stream") else None,
    )


def to_chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Translates system and messages; blocks that chat messages cannot express stay unchanged."""
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": to_content(body["system"], _to_part)})
    for message in body.get("messages") or ():
        content = message["content"]
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        elif message["role"] == "assistant":
            messages.append(_to_assistant(content))
        else:
            messages += _to_others(message["role"], content)
    return messages


def to_chat_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Translates the tools; Anthropic's own tools stay unchanged."""
    return [_to_tool(tool) if "input_schema" in tool else tool for tool in body.get("tools") or ()]


def _to_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    description, strict = tool.get("description"), tool.get("strict")
    function = take(name=tool["name"], description=description, parameters=tool["input_schema"], strict=strict)
    return {"type": "function", "function": function}


def _to_assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    others = [block for block in blocks if block["type"] not in ("thinking", "redacted_thinking", "tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": to_content(others, _to_part) if others else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [to_tool_call(c["id"], c["name"], dump_json(c["input"]).decode()) for c in calls]
    return message


def _to_others(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Translates a user's message: tool results become separate messages, before the rest."""
    for block in blocks:
        if block["type"] == "tool_result":
            content = to_tool_result(block.get("content"), _to_part, has_failed=block.get("is_error") is True)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    others = [block for block in blocks if block["type"] != "tool_result"]
    if others:
        yield {"role": role, "content": to_content(others, _to_part)}


def _to_part(block: Mapping[str, Any]) -> dict[str, Any]:
    source = block.get("source") or {}
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "image" and source.get("type") in ("base64", "url"):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    return dict(block)


def _to_tool_choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return _TOOL_CHOICES.get(str(choice.get("type")))


def _to_format(form: Any) -> Any:
    if not form:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}


def _to_block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "tool_call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": parse_arguments(part.text)}
    return {"type": "text", "text": part.text}
