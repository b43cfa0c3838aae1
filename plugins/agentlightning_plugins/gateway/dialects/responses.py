"""OpenAI's Responses: relayed to backends that speak it, translated to Chat Completions for others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.chat_part import Part, PartTranslation, take, to_content, to_tool_result
from agentlightning_plugins.gateway.dialects.dialect import (
    Completion,
    CompletionChoice,
    CompletionToolCall,
    Translation,
    TranslationError,
    to_tool_call,
)
from agentlightning_plugins.gateway.dialects.fields import RESPONSE_FIELDS
from agentlightning_plugins.gateway.dialects.openai import CHAT, OpenAIDialect
from agentlightning_plugins.gateway.dialects.response_tools import (
    FunctionTools,
    function_name,
    to_known_item,
    without_type,
)
from agentlightning_plugins.gateway.dialects.wire import dump_json, to_typed_event

_DELTAS: Final = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
}
_CALLS: Final = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
}
"""The items that are tool calls for the agent, and their key with the arguments: text, or an object or list."""
_STREAMED: Final = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
"""The items whose arguments are streamed, and the events of their deltas."""
_OUTPUTS: Final = frozenset(f"{kind}_output" for kind in _CALLS)
_LAST: Final = ("response.completed", "response.incomplete", "response.failed")


class Responses(OpenAIDialect):
    """OpenAI's Responses."""

    name = "openai-responses"
    routes = ("v1/responses",)
    path = "responses"
    span_name = "responses"
    operation = "chat"
    final_status = 400  # Codex tries every other one again
    fields = RESPONSE_FIELDS

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return CHAT.read_messages({"messages": to_chat_messages(body)})

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        return CHAT.read_tools({"tools": to_chat_tools(body)})

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        completion.id, completion.model = answer["id"], answer.get("model")
        usage = answer.get("usage") or {}
        completion.input_tokens, completion.output_tokens = usage.get("input_tokens"), usage.get("output_tokens")
        choice = completion.choices[0] = CompletionChoice()
        for position, item in enumerate(answer["output"]):
            _read_item(item, position, choice)
        status = answer.get("status")
        if status == "completed":
            choice.finish_reason = "tool_calls" if choice.tool_calls else "stop"
        elif status == "incomplete":
            reason = (answer.get("incomplete_details") or {}).get("reason") or "length"
            choice.finish_reason = "length" if reason == "max_output_tokens" else reason
        else:
            error = answer.get("error") or {}
            completion.error = str(error.get("message") or f"the response is {status}, not completed")

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        kind = chunk["type"]
        if kind in _DELTAS:
            choice, key = completion.choice(0), _DELTAS[kind]
            setattr(choice, key, getattr(choice, key) + chunk["delta"])
        elif kind.removesuffix(".delta") in _STREAMED.values() and kind.endswith(".delta"):
            call = completion.choice(0).tool_calls.setdefault(chunk["output_index"], CompletionToolCall())
            call.arguments += chunk["delta"]
        elif kind in ("response.output_item.added", "response.output_item.done"):
            if chunk["item"].get("type") in _CALLS:
                completion.choice(0).tool_calls[chunk["output_index"]] = _read_call(chunk["item"])
        elif kind in _LAST:
            self.read_answer(chunk["response"], completion)
            completion.is_ended = True
        elif kind == "response.created":
            completion.id, completion.model = chunk["response"]["id"], chunk["response"].get("model")
        elif kind == "error":
            completion.error = str((chunk.get("error") or chunk).get("message"))

    def to_events(self, answer: Mapping[str, Any]) -> bytes:
        events: list[tuple[str, dict[str, Any]]] = []
        events.append(("response.created", {"response": {**answer, "status": "in_progress", "output": []}}))
        for index, item in enumerate(answer["output"]):
            events += _to_events(item, {"output_index": index, "item_id": item.get("id")})
        events.append((f"response.{answer['status']}", {"response": answer}))
        return b"".join([to_typed_event(kind, sequence_number=n, **more) for n, (kind, more) in enumerate(events)])

    def collect(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        for chunk in chunks:
            if chunk["type"] in _LAST:
                return dict(chunk["response"])
        raise ValueError("the stream ended early")

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        return ResponsesTranslation(body)

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        error = self.error_body(status, message, code)  # the client raises the content of "error"
        return to_typed_event("error", code=code, message=message, param=None, sequence_number=0, **error)


def _to_events(item: Mapping[str, Any], where: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the events of one whole item of an answer: their types and fields."""
    index, parts = where["output_index"], item["content"] if item["type"] == "message" else ()
    streamed = _STREAMED.get(item["type"], "")
    blank: dict[str, Any] = (
        {"content": []} if item["type"] == "message" else {_CALLS[item["type"]]: ""} if streamed else {}
    )
    yield "response.output_item.added", {"output_index": index, "item": {**item, **blank}}
    for number, part in enumerate(parts):
        key, kind = "refusal" if part["type"] == "refusal" else "text", f"response.{part['type']}"
        extra: dict[str, Any] = {**where, "content_index": number}
        yield "response.content_part.added", {**extra, "part": {**part, key: ""}}
        yield f"{kind}.delta", {**extra, "delta": part[key], "logprobs": []}
        yield f"{kind}.done", {**extra, key: part[key], "logprobs": []}
        yield "response.content_part.done", {**extra, "part": part}
    if streamed:
        key = _CALLS[item["type"]]
        yield f"{streamed}.delta", {**where, "delta": item[key]}
        yield f"{streamed}.done", {**where, "name": item["name"], key: item[key]}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _read_call(item: Mapping[str, Any]) -> CompletionToolCall:
    kind = item["type"]
    found = item.get(_CALLS[kind]) or item.get("actions") or ""
    arguments = found if isinstance(found, str) else dump_json(found).decode()
    name = item["name"] if kind in ("function_call", "custom_tool_call") else kind.removesuffix("_call")
    return CompletionToolCall(item.get("call_id") or item.get("id"), name, arguments)


def _read_item(item: Mapping[str, Any], position: int, choice: CompletionChoice) -> None:
    match item.get("type"):
        case "message":
            for part in item["content"]:
                choice.text += part.get("text") or ""
                choice.refusal += part.get("refusal") or ""
        case "reasoning":
            choice.reasoning += "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        case kind if kind in _CALLS:
            choice.tool_calls[position] = _read_call(item)
        case _:  # tools that OpenAI ran itself: the following text contains their results
            pass


_STATEFUL: Final = ("previous_response_id", "conversation", "prompt", "background")
_DROPPED: Final = frozenset(
    # Translated below, or meaningless if nothing is stored and no tool is hosted.
    "input instructions tools tool_choice text max_output_tokens reasoning include truncation store stream_options "
    "max_tool_calls context_management prompt_cache_options prompt_cache_retention moderation".split()
).union(_STATEFUL)
_ITEMS: Final = frozenset({"additional_tools", "agent_message", "message", "reasoning"}).union(_CALLS, _OUTPUTS)
_REPEATED: Final[Mapping[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields that a response repeats from its request, with their defaults."""
_COUNTED: Final = ("prompt", "completion")
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIX: Final = {"reasoning": "rs", "text": "msg", "refusal": "msg", "tool_call": "fc"}
_EVENT: Final = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "refusal": "response.refusal",
    "tool_call": "response.function_call_arguments",
}
_TEXT_KEY: Final = {"reasoning": "text", "text": "text", "refusal": "refusal", "tool_call": "arguments"}


class ResponsesTranslation(PartTranslation):
    """Translates one call of Responses. Each part of the answer becomes an output item."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self._keeps_logprobs = _wants_logprobs(body)
        self._next_number = 0
        self._tools = FunctionTools(body)
        self.left_out_tools = self._tools.left_out

    def request(self) -> dict[str, Any]:
        return _to_chat_request(self._body, self._tools)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._read_whole(answer)
        return self._response(self._status())

    def close(self) -> bytes:
        last = self._end_parts()
        if not self._parts:  # clients expect a message, even an empty one
            last += b"" if self._has_begun else self._begin()
            self._new_part("text")
            last += self._end_parts()
        status = self._status()
        return last + self._event(f"response.{status}", response=self._response(status))

    def _begin(self) -> bytes:
        response = self._response("in_progress") | {"output": []}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _start(self, part: Part) -> bytes:
        item = self._item(part, "in_progress")
        content = item.pop("content", None)
        head = item if content is None else item | {"content": []}
        events = self._event("response.output_item.added", output_index=part.index, item=head)
        if content is not None:
            events += self._event("response.content_part.added", **self._position(part), part=content[0])
        return events

    def _add(self, part: Part, text: str, logprobs: Sequence[Any]) -> bytes:
        if self._tools.is_custom(part):
            return b""  # its input is text inside JSON, and is sent at its end
        extra = {"logprobs": logprobs} if part.kind == "text" else {}
        return self._event(f"{_EVENT[part.kind]}.delta", **self._position(part), delta=text, **extra)

    def _stop(self, part: Part) -> bytes:
        item, position = self._item(part, "completed"), self._position(part)
        done: dict[str, Any] = {_TEXT_KEY[part.kind]: part.text}
        if part.kind == "text":
            done["logprobs"] = part.logprobs
        elif self._tools.is_custom(part):
            kind = _STREAMED["custom_tool_call"]
            events = self._event(f"{kind}.delta", **position, delta=item["input"])
            events += self._event(f"{kind}.done", **position, input=item["input"])
            return events + self._event("response.output_item.done", output_index=part.index, item=item)
        elif part.kind == "tool_call":
            done["name"] = item["name"]
        events = self._event(f"{_EVENT[part.kind]}.done", **position, **done)
        if part.kind != "tool_call":
            events += self._event("response.content_part.done", **position, part=item["content"][0])
        return events + self._event("response.output_item.done", output_index=part.index, item=item)

    def _position(self, part: Part) -> dict[str, Any]:
        item = {"output_index": part.index, "item_id": self._item_id(part)}
        return item if part.kind == "tool_call" else item | {"content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._next_number += 1
        return to_typed_event(kind, sequence_number=self._next_number - 1, **fields)

    def _status(self) -> str:
        return "incomplete" if self._finish_reason in _INCOMPLETE else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self._finish_reason or "") if status == "incomplete" else None
        parts = self._parts or ([] if status == "in_progress" else [Part("text", 0)])
        given = {key: value for key, value in self._body.items() if key in _REPEATED and value is not None}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._model,
            "output": [self._item(part, "completed") for part in parts],
            "usage": _usage(self._usage) if self._usage else None,
            **_REPEATED,
            **given,
        }

    def _item_id(self, part: Part) -> str:
        return f"{_PREFIX[part.kind]}_{self._id}_{part.index}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        match part.kind:
            case "tool_call":
                return item | self._tools.to_item(part)
            case "reasoning":
                return item | {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": part.text}],
                }
            case "refusal":
                content: dict[str, Any] = {"type": "refusal", "refusal": part.text}
            case _:
                logprobs = list(part.logprobs)
                content = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}
        return item | {"type": "message", "role": "assistant", "content": [content]}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    taken, made = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage.get("prompt_tokens") or 0,
        "input_tokens_details": {"cached_tokens": taken.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": {"reasoning_tokens": made.get("reasoning_tokens") or 0},
        "total_tokens": usage.get("total_tokens") or sum(usage.get(f"{kind}_tokens") or 0 for kind in _COUNTED),
    }


def _wants_logprobs(body: Mapping[str, Any]) -> bool:
    return "message.output_text.logprobs" in (body.get("include") or ()) or bool(body.get("top_logprobs"))


def _to_chat_request(body: Mapping[str, Any], tools: FunctionTools) -> dict[str, Any]:
    _check(body)
    if isinstance(body["input"], list):
        items = [to_known_item(item) for item in body["input"] if item.get("type") != "additional_tools"]
        body = {**body, "input": items}
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    chat: dict[str, Any] = {key: value for key, value in body.items() if key not in _DROPPED}
    chat["messages"] = to_chat_messages(body)
    if tools.functions:
        chat["tools"] = tools.functions
    chat |= take(
        max_completion_tokens=body.get("max_output_tokens"),
        tool_choice=_to_choice(body.get("tool_choice")),
        response_format=_to_format(text.get("format")),
        verbosity=text.get("verbosity"),
        reasoning_effort=reasoning.get("effort"),
        logprobs=_wants_logprobs(body) or None,
        stream_options={"include_usage": True} if body.get("stream") else None,
    )
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {function_name(tool.get("name"), tool.get("namespace")) for tool in choice.get("tools") or ()}
        chat["tools"] = [tool for tool in tools.functions if tool["function"]["name"] in allowed]
    return chat


def to_chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Translates the input; items that chat messages cannot express become parts of a user's message."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items or ():
        _add_item(item, messages)
    return messages


def to_chat_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Translates the tools; tools that are not functions stay unchanged."""
    return [
        {"type": "function", "function": without_type(tool)} if tool.get("type") == "function" else tool
        for tool in body.get("tools") or ()
    ]


def _check(body: Mapping[str, Any]) -> None:
    for key in _STATEFUL:
        if body.get(key):
            raise TranslationError(
                f"{key!r} needs a server that keeps responses, and the model behind this gateway is served by Chat "
                "Completions: send the whole input with each request"
            )
    items = body.get("input")
    if not isinstance(items, (str, list)):
        raise TranslationError(f"'input' is {items!r}; give a text or a list of items")
    for item in () if isinstance(items, str) else items:
        if item.get("type", "message") not in _ITEMS:
            raise TranslationError(
                f"input items of type {item.get('type')!r} have no form in Chat Completions, which serves the model "
                f"behind this gateway; supported types: {', '.join(sorted(_ITEMS))}"
            )


def _add_item(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            message = _assistant(messages, "content", "tool_calls")
            message["content"] = to_content(item.get("content"), _to_part)
        case "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": to_content(item.get("content"), _to_part)})
        case "reasoning":
            text = "".join(part.get("text") or "" for part in item.get("content") or item.get("summary") or ())
            if text:
                message = _assistant(messages, "content", "tool_calls")
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        case kind if kind in _CALLS:
            call = _read_call(item)
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append(to_tool_call(call.id, call.name, call.arguments))
        case kind if kind in _OUTPUTS:
            call_id, has_failed = item.get("call_id") or item.get("id"), item.get("status") == "failed"
            content = to_tool_result(item.get("output"), _to_part, has_failed=has_failed)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case _:
            messages.append({"role": "user", "content": [dict(item)]})


def _assistant(messages: list[dict[str, Any]], *later: str) -> dict[str, Any]:
    """Returns the assistant's message for an item: the last message, or a new one if it has a key of ``later``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(key) for key in later):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _to_part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part.get("text")}
        case "refusal":
            return {"type": "text", "text": part.get("refusal")}
        case "input_image":
            return {"type": "image_url", "image_url": take(url=part.get("image_url"), detail=part.get("detail"))}
        case "input_file":
            return {"type": "file", "file": without_type(part)}
        case _:
            return dict(part)


def _to_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return choice.get("mode") or "auto"
    if choice.get("type") not in ("function", "custom"):
        return None
    return {"type": "function", "function": {"name": function_name(choice["name"], choice.get("namespace"))}}


def _to_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return None if form is None or form.get("type") == "text" else form
    return {"type": "json_schema", "json_schema": without_type(form)}
