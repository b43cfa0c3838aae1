"""The conversations of an attempt, as plain values for pages and reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentlightning import semconv
from agentlightning.frozen import thaw
from agentlightning.types import Span
from agentlightning_plugins.shared import chat_history


def read_conversations(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the conversations of an attempt, each with its messages and tools."""
    return [
        {
            "messages": [_describe_message(message) for message in history["messages"]],
            "tools": [str((tool.get("function") or {}).get("name", "")) for tool in history.get("tools") or ()],
        }
        for history in chat_history.read_conversations(spans)
    ]


def _describe_message(message: semconv.Message) -> dict[str, Any]:
    """Returns a message with its texts; parts that are not text are shown as JSON."""
    content = thaw(message.get("content"))
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif part is not None:
            texts.append(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str))
    calls = [
        {
            "id": call.get("id"),
            "name": str((call.get("function") or {}).get("name", "")),
            "arguments": _pretty((call.get("function") or {}).get("arguments")),
        }
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict)
    ]
    return {
        "role": str(message.get("role", "")),
        "text": "\n".join(texts),
        "reasoning": str(message.get("reasoning_content") or ""),
        "refusal": str(message.get("refusal") or ""),
        "tool_calls": calls,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _pretty(arguments: Any) -> str:
    parsed = semconv.parse_json(arguments, arguments)
    return parsed if isinstance(parsed, str) else json.dumps(thaw(parsed), indent=2, ensure_ascii=False, default=str)
