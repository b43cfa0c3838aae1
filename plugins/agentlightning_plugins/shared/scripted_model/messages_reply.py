"""Scripted answers in the format of Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentlightning_plugins.shared.scripted_model.script import Answer, cut, encode, to_text

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
