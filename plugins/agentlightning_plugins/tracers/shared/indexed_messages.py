"""Reads operations, and messages and tools with one attribute for each field, such as ``gen_ai.prompt.0.content``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.records import Span

_OPERATIONS: Final = {"llm": "chat", "tool": "execute_tool", "agent": "invoke_agent", "completion": "text_completion"}


def to_operation(kind: object) -> str | None:
    """Returns OpenTelemetry's name of an operation; ``kind`` is the library's, in any case, or None."""
    return None if kind is None else _OPERATIONS.get(str(kind).lower(), str(kind).lower())


def read_messages(span: Span, prefix: str) -> list[semconv.Message] | None:
    """Returns the messages ``{prefix}.{n}.*``; OpenInference adds ``.message`` after the number."""
    items = semconv.read_indexed(span.attributes, prefix)
    return [_from_fields(item.get("message", item)) for item in items] or None


def read_functions(span: Span) -> list[semconv.Message] | None:
    """Returns the tools ``llm.request.functions.{n}.*``; None if there are none."""
    return [
        {key: semconv.parse_json(value, value) for key, value in tool.items() if value is not None}
        for prefix in ("llm.request.functions", "gen_ai.request.functions")
        for tool in semconv.read_indexed(span.attributes, prefix)
    ] or None


def _from_fields(item: Mapping[str, Any]) -> semconv.Message:
    """Converts one message of the indexed conventions."""
    content = item.get("content")
    if content is None:
        content = [_to_content_part(_unwrap(part)) for part in semconv.listed(item.get("contents"))]
    elif isinstance(content, str) and content.startswith("[{"):
        parsed = semconv.parse_json(content)
        content = parsed if isinstance(parsed, list) else content
    calls = []
    for call in map(_unwrap, semconv.listed(item.get("tool_calls"))):
        function = call.get("function", call)
        calls.append(semconv.make_tool_call(call.get("id"), function.get("name"), function.get("arguments")))
    message = semconv.make_message(str(item.get("role") or "assistant"), content, calls, {})
    if item.get("tool_call_id"):
        message["tool_call_id"] = item["tool_call_id"]
    return message


def _to_content_part(part: Mapping[str, Any]) -> dict[str, Any]:
    image = part.get("image")
    if isinstance(image, dict):
        return {"type": "image_url", "image_url": {"url": _unwrap(image).get("url")}}
    return {"type": "text", "text": str(part.get("text", ""))}


def _unwrap(item: dict[str, Any]) -> dict[str, Any]:
    """Unwraps a list item of OpenInference, which nests it under a name such as ``tool_call``."""
    if len(item) == 1:
        (inner,) = item.values()
        return inner if isinstance(inner, dict) else item
    inner = item.get("message_content")
    return inner if isinstance(inner, dict) else item
