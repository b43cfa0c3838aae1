"""Scripted answers in the format of OpenAI's Responses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning_plugins.shared.scripted_model.script import Answer, cut, encode, to_text

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
