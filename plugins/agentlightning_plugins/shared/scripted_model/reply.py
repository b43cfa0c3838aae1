"""Scripted answers, in the formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

EOS: Final = 256
"""The token that ends every answer."""
CHUNK_CHARS: Final = 4
"""Characters of text per streamed chunk."""


def encode(text: str) -> list[int]:
    """Returns the tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """Returns the text of tokens, without ``EOS``."""
    return bytes(token for token in token_ids if token != EOS).decode()


def logprob(token_id: int) -> float:
    """Returns the log-probability of a token; exact in binary, so tests can use ``==``."""
    return -(token_id % 15 + 1) / 16


def encode_prompt(body: Mapping[str, Any]) -> list[int]:
    """Returns the tokens of a request's prompt. Answers in its history have the tokens with which they were sampled."""
    if "messages" not in body:
        return encode(str(body["prompt"]))
    tokens: list[int] = []
    for message in body["messages"]:
        calls = [call["function"] for call in message.get("tool_calls") or () if call and "function" in call]
        texts = [str(message.get(name) or "") for name in ("reasoning_content", "content", "refusal")]
        texts += [f"<tool_call>{call.get('name')}{call.get('arguments')}" for call in calls]
        tokens += encode(f"<{message['role']}>{''.join(texts)}")
        tokens += [EOS] if message["role"] == "assistant" else []
    return tokens + encode("<assistant>")


def render_prompt(body: Mapping[str, Any]) -> str:
    """Returns the text of a request's prompt."""
    return decode(encode_prompt(body))


def to_text(arguments: str | Mapping[str, Any]) -> str:
    """Returns the arguments of a tool call as they are sent."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def cut(text: str) -> Iterator[str]:
    """Splits a text into pieces of ``CHUNK_CHARS``."""
    for start in range(0, len(text), CHUNK_CHARS):
        yield text[start : start + CHUNK_CHARS]


@dataclass(frozen=True)
class RecordedRequest:
    """A request of a client."""

    path: str
    """Path, including the query."""
    headers: Mapping[str, str]
    """Headers by case-insensitive name."""
    raw: bytes
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The server's reaction to one request. The fields from ``status`` on make the server misbehave."""

    content: str | None = None
    """Default: None with tool calls or a refusal, else ``ok``."""
    tool_calls: Sequence[tuple[str, str | Mapping[str, Any]]] = ()
    """Name and arguments of each call. Arguments that are text are sent unchanged, even if they are not JSON."""
    finish_reason: str | None = None
    """Default: ``tool_calls`` if there are any, else ``stop``."""
    reasoning: str | None = None
    """Reasoning text; its tokens come first."""
    refusal: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level fields of the answer, such as ``weight_version``."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    """Delay before the status line."""
    until: asyncio.Event | None = None
    """Event to wait for after the delay."""
    chunk_delay_s: float = 0.0
    """Delay before each chunk of a stream except the first."""
    status: int = 200
    error: str = "scripted error"
    """The message when ``status`` is an error."""
    cut_after: int | None = None
    """Disconnects after this many chunks of a stream, or halfway through a body; 0: before the status line."""
    body: bytes | None = None
    """Sent unchanged instead of the answer."""
    content_type: str = "application/json"
    """Content type of ``body``."""

    def text(self, index: int = 0) -> str | None:
        """Returns the text of choice ``index``; texts other than the first contain their index."""
        content = self.content
        if content is None:
            if self.tool_calls or self.refusal:
                return None
            content = "ok"
        return content if index == 0 else f"{content} #{index}"

    def count_tokens(self) -> int:
        """Returns the number of tokens of choice 0, including ``EOS``."""
        text = (self.reasoning or "") + (self.text() or "") + (self.refusal or "")
        calls = [f"<tool_call>{name}{to_text(arguments)}" for name, arguments in self.tool_calls]
        return len(encode(text + "".join(calls))) + 1


class ChatReply:
    """One answer, whole or in chunks."""

    def __init__(self, body: Mapping[str, Any], answer: Answer, reply_id: str, *, give_ids: bool) -> None:
        self._body, self._answer, self._id = body, answer, reply_id
        self._is_chat = "messages" in body
        self._ids = give_ids and bool(body.get("return_token_ids"))
        asked = body.get("logprobs")
        self._logprobs = bool(asked) if self._is_chat else asked is not None
        self._prompt_ids = encode_prompt(body)
        self._reason = answer.finish_reason or ("tool_calls" if answer.tool_calls else "stop")

    def whole(self) -> dict[str, Any]:
        """Returns the answer to a request without ``stream``."""
        choices, count = [], 0
        for index in range(self._body.get("n") or 1):
            tokens = [token for piece in self._pieces(index) for token in piece[1]]
            count += len(tokens)
            choice = self._choice(index, tokens, self._reason)
            if self._is_chat:
                calls = self._tool_calls(index)
                answer = self._answer
                message = {"role": "assistant", "content": answer.text(index), "refusal": answer.refusal}
                reasoning = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
                choice["message"] = {**message, **reasoning, **({"tool_calls": calls} if calls else {})}
            else:
                choice["text"] = self._answer.text(index) or ""
            choices.append(choice)
        return self._envelope("", choices) | {"usage": self._usage(count)}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a stream; the first has the role, and the last the finish reason."""
        first, count = True, 0
        for index in range(self._body.get("n") or 1):
            for delta, tokens, last in self._pieces(index):
                count += len(tokens)
                choice = self._choice(index, tokens, self._reason if last else None)
                if not self._is_chat:
                    choice["text"] = delta.get("content", "")
                else:
                    choice["delta"] = {"role": "assistant", **delta} if first else delta
                chunk = self._envelope(".chunk", [choice])
                for each in () if first else (chunk, choice):
                    each.pop("prompt_token_ids", None)
                yield chunk
                first = False
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(".chunk", []) | {"usage": self._usage(count)}

    def _tool_calls(self, index: int) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call-{self._id}-{index}-{position}",
                "type": "function",
                "function": {"name": name, "arguments": to_text(arguments)},
            }
            for position, (name, arguments) in enumerate(self._answer.tool_calls)
        ]

    def _pieces(self, index: int) -> Iterator[tuple[dict[str, Any], list[int], bool]]:
        """Yields delta, tokens and whether it is the last, for each chunk of one choice."""
        answer = self._answer
        texts = {"reasoning_content": answer.reasoning, "content": answer.text(index), "refusal": answer.refusal}
        for key, text in texts.items():
            for piece in cut(text or ""):
                yield {key: piece}, encode(piece), False
        for position, call in enumerate(self._tool_calls(index)):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            head = {**call, "index": position, "function": {"name": name, "arguments": ""}}
            yield {"tool_calls": [head]}, encode(f"<tool_call>{name}"), False
            for piece in cut(arguments):
                yield {"tool_calls": [{"index": position, "function": {"arguments": piece}}]}, encode(piece), False
        yield {}, [EOS], True

    def _choice(self, index: int, tokens: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._ids:
            choice["token_ids"] = tokens
            if not self._is_chat:
                choice["prompt_token_ids"] = self._prompt_ids
        if self._logprobs:
            texts, values = [decode([t]) if t < 128 else "" for t in tokens], [logprob(t) for t in tokens]
            choice["logprobs"] = (
                {"content": [_chat_logprob(text, value) for text, value in zip(texts, values, strict=True)]}
                if self._is_chat
                else {"tokens": texts, "token_logprobs": values, "text_offset": [], "top_logprobs": None}
            )
        return choice

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{kind}" if self._is_chat else "text_completion"
        envelope: dict[str, Any] = {
            "id": self._id,
            "object": name,
            "created": int(time.time()),
            "model": self._body.get("model"),
            "choices": choices,
        }
        if self._ids and self._is_chat:
            envelope["prompt_token_ids"] = self._prompt_ids
        return envelope | dict(self._answer.extra)

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt, total = len(self._prompt_ids), len(self._prompt_ids) + completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": total}


def _chat_logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


def embed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer of Embeddings: the vector of a text is its length and its first token."""
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    data = [
        {"object": "embedding", "index": index, "embedding": [float(len(text)), float(encode(text)[0])]}
        for index, text in enumerate(texts)
    ]
    count = sum(len(encode(text)) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}


Event = dict[str, Any]


class ResponsesReply:
    """One answer, whole or in events."""

    def __init__(self, body: Mapping[str, Any], answer: Answer, reply_id: str) -> None:
        self._body, self._answer, self._id = body, answer, f"resp_{reply_id}"

    def whole(self) -> dict[str, Any]:
        """Returns the answer to a request without ``stream``."""
        answer, prompt = self._answer, len(encode(json.dumps(self._body["input"])))
        is_cut = answer.finish_reason == "length"
        output_tokens = answer.count_tokens()
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._body["model"],
            "output": self._items(),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._body.get("tools") or [],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + output_tokens,
            },
            **answer.extra,
        }

    def events(self) -> Iterator[Event]:
        """Yields the events of a stream."""
        for number, event in enumerate(self._events()):
            yield {**event, "sequence_number": number}

    def _events(self) -> Iterator[Event]:
        whole = self.whole()
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(whole["output"]):
            yield from _item_events(item, index)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _items(self) -> list[dict[str, Any]]:
        answer, items = self._answer, []
        if answer.reasoning is not None:
            content = [{"type": "reasoning_text", "text": answer.reasoning}]
            items.append({"id": "rs_0", "type": "reasoning", "summary": [], "content": content})
        text = answer.text()
        if text is not None or answer.refusal is not None:
            part: dict[str, Any] = {"type": "refusal", "refusal": answer.refusal}
            if text is not None:
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
            items.append({"id": "msg_0", **message})
        for position, (name, arguments) in enumerate(answer.tool_calls):
            call = {"call_id": f"call-{self._id}-{position}", "name": name, "arguments": to_text(arguments)}
            items.append({"id": f"fc_{position}", "type": "function_call", "status": "completed", **call})
        return items


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[Event]:
    where: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
    extra: dict[str, Any] = {}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "arguments": ""}}
        kind, key, texts = "response.function_call_arguments", "arguments", item["arguments"]
        done: dict[str, Any] = {"name": item["name"]}
    else:
        part = item["content"][0]
        key = "refusal" if part["type"] == "refusal" else "text"
        where["content_index"] = 0
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}}
        yield {"type": "response.content_part.added", **where, "part": {**part, key: ""}}
        kind, texts = f"response.{part['type']}", part[key]
        extra = {"logprobs": []} if part["type"] == "output_text" else {}
        done = extra
    for piece in cut(texts):
        yield {"type": f"{kind}.delta", **where, "delta": piece, **extra}
    yield {"type": f"{kind}.done", **where, key: texts, **done}
    if "content" in item:
        yield {"type": "response.content_part.done", **where, "part": item["content"][0]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}


class MessagesReply:
    """One answer, whole or in events."""

    def __init__(self, body: Mapping[str, Any], answer: Answer, reply_id: str) -> None:
        self._body, self._answer, self._id = body, answer, f"msg_{reply_id}"

    def whole(self) -> dict[str, Any]:
        """Returns the answer to a request without ``stream``."""
        answer = self._answer
        reason = "tool_use" if answer.tool_calls else "end_turn"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body["model"],
            "content": [block for block, *_ in self._blocks()],
            "stop_reason": _REASONS.get(answer.finish_reason or "", reason),
            "stop_sequence": None,
            "usage": {"input_tokens": count_tokens(self._body), "output_tokens": answer.count_tokens()},
            **answer.extra,
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the events of a stream."""
        whole = self.whole()
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 1}}
        yield {"type": "message_start", "message": whole | begun}
        yield {"type": "ping"}
        for index, (block, kind, key, text) in enumerate(self._blocks()):
            blank: dict[str, Any] = {"input": {}} if block["type"] == "tool_use" else {key: ""}
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **blank}}
            for piece in cut(text):
                yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: piece}}
            yield {"type": "content_block_stop", "index": index}
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
        yield {"type": "message_stop"}

    def _blocks(self) -> list[tuple[dict[str, Any], str, str, str]]:
        """Returns the blocks of the content, each with the type, key and whole text of its deltas."""
        answer = self._answer
        blocks: list[tuple[dict[str, Any], str, str, str]] = []
        if (thought := answer.reasoning) is not None:
            block = {"type": "thinking", "thinking": thought, "signature": "signed"}
            blocks.append((block, "thinking_delta", "thinking", thought))
        text = answer.text() if answer.refusal is None else answer.refusal
        if text is not None:
            blocks.append(({"type": "text", "text": text}, "text_delta", "text", text))
        for position, (name, arguments) in enumerate(answer.tool_calls):
            tool = {"type": "tool_use", "id": f"toolu-{self._id}-{position}", "name": name, "input": _parse(arguments)}
            blocks.append((tool, "input_json_delta", "partial_json", to_text(arguments)))
        return blocks


def count_tokens(body: Mapping[str, Any]) -> int:
    """Returns the number of input tokens: the bytes of the messages as JSON."""
    return len(encode(json.dumps(body["messages"])))


def _parse(arguments: str | Mapping[str, Any]) -> Any:
    """Returns the input of a tool; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
