"""OpenAI's Responses over Chat Completions: a model that is served by the one answers in the form of the other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.chat_part import Part, PartReader, Step
from agentlightning_plugins.gateway.dialects.json_text import dump_json
from agentlightning_plugins.gateway.dialects.responses_request import to_chat_request, wants_logprobs
from agentlightning_plugins.gateway.dialects.sse import to_event

_ECHOED: Final[Mapping[str, Any]] = {
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
"""What a response repeats of its request, and what it says where that says nothing."""
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIX: Final = {"reasoning": "rs", "text": "msg", "refusal": "msg", "tool_call": "fc"}
_EVENT: Final = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "refusal": "response.refusal",
    "tool_call": "response.function_call_arguments",
}
_TEXT_KEY: Final = {"reasoning": "text", "text": "text", "refusal": "refusal", "tool_call": "arguments"}


class ResponsesTranslation:
    """One call of Responses, carried over Chat Completions. Each part of the answer is an output item of its own."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._reader = PartReader(keeps_logprobs=wants_logprobs(body))
        self._number = 0
        self._has_begun = False

    def request(self) -> dict[str, Any]:
        return to_chat_request(self._body)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._reader.read_whole(answer)
        return self._response(self._status())

    def feed(self, chunk: dict[str, Any]) -> bytes:
        steps = list(self._reader.feed(chunk))
        return self._begin() + b"".join([self._tell(step) for step in steps])

    def close(self) -> bytes:
        last = b"".join([self._tell(step) for step in self._reader.close()])
        if not self._reader.parts:  # clients expect a message, though there may be nothing to say
            empty = Part("text", 0)
            self._reader.parts.append(empty)
            last = self._begin() + self._tell(Step("start", empty)) + self._tell(Step("stop", empty))
        status = self._status()
        return last + self._event(f"response.{status}", response=self._response(status))

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._response("in_progress") | {"output": []}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _tell(self, step: Step) -> bytes:
        part = step.part
        item = {"output_index": part.index, "item_id": self._item_id(part)}
        where = item if part.kind == "tool_call" else item | {"content_index": 0}
        if step.event == "delta":
            extra = {"logprobs": list(step.logprobs)} if part.kind == "text" else {}
            return self._event(f"{_EVENT[part.kind]}.delta", **where, delta=step.delta, **extra)
        is_start = step.event == "start"
        whole = self._item(part, "in_progress" if is_start else "completed")
        if is_start:
            content = whole.pop("content", None)
            head = whole | ({} if content is None else {"content": []})
            told = self._event("response.output_item.added", output_index=part.index, item=head)
            if content is None:
                return told
            blank = content[0] | {_TEXT_KEY[part.kind]: ""}
            return told + self._event("response.content_part.added", **where, part=blank)
        done: dict[str, Any] = {_TEXT_KEY[part.kind]: part.text}
        if part.kind == "text":
            done["logprobs"] = list(part.logprobs)
        elif part.kind == "tool_call":
            done["name"] = part.name
        told = self._event(f"{_EVENT[part.kind]}.done", **where, **done)
        if part.kind != "tool_call":
            told += self._event("response.content_part.done", **where, part=whole["content"][0])
        return told + self._event("response.output_item.done", output_index=part.index, item=whole)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\n%b" % (kind.encode(), to_event(dump_json(event)))

    def _status(self) -> str:
        return "incomplete" if self._reader.finish_reason in _INCOMPLETE else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        reader = self._reader
        reason = _INCOMPLETE.get(reader.finish_reason or "") if status == "incomplete" else None
        parts = reader.parts or ([] if status == "in_progress" else [Part("text", 0)])
        given = {key: value for key, value in self._body.items() if key in _ECHOED and value is not None}
        return {
            "id": reader.id,
            "object": "response",
            "created_at": reader.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": reader.model,
            "output": [self._item(part, "completed") for part in parts],
            "usage": _usage(reader.usage) if reader.usage else None,
            **_ECHOED,
            **given,
        }

    def _item_id(self, part: Part) -> str:
        return f"{_PREFIX[part.kind]}_{self._reader.id}_{part.index}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        match part.kind:
            case "tool_call":
                call = {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": part.text}
                return item | call
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
        "total_tokens": usage.get("total_tokens") or 0,
    }
