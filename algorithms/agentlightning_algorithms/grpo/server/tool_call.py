"""Tool calls in the format of the Hermes family of models.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

The chat templates of these models, such as Qwen 2.5 and 3, write calls in this format.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call to a tool."""

    name: str
    arguments: str
    """A JSON object as text, as in the OpenAI API."""


class ToolCallReader:
    """Extracts tool calls from a text that arrives in pieces.

    A block that is not a JSON object with a name and an object of arguments stays in the text unchanged. White space
    before a call is removed with it, and so is white space after it unless it separates two texts.
    """

    def __init__(self) -> None:
        self._held = ""
        self._has_text = False
        self._after_call = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Takes another piece; returns the text that cannot belong to a call, and complete calls."""
        self._held += text
        said, calls = "", []
        while True:
            if self._after_call and not self._has_text:
                self._held = self._held.lstrip()
            start = self._held.find(_OPEN)
            end = self._held.find(_CLOSE, start + len(_OPEN)) if start >= 0 else -1
            if end < 0:
                break
            block, self._held = self._held[:end], self._held[end + len(_CLOSE) :]
            call = _parse_call(block[start + len(_OPEN) :])
            if call is not None:
                calls.append(call)
            fresh = block + _CLOSE if call is None else block[:start].rstrip()
            said += fresh
            self._has_text |= bool(fresh)
            self._after_call = call is not None
        if start >= 0:
            sure = len(self._held[:start].rstrip())
        else:
            # A call may follow: its tag may have begun, and white space before it would be removed.
            tag = next(n for n in range(len(_OPEN) - 1, -1, -1) if self._held.endswith(_OPEN[:n]))
            sure = len(self._held[: len(self._held) - tag].rstrip())
        fresh, self._held = self._held[:sure], self._held[sure:]
        if fresh:
            self._has_text, self._after_call = True, False
        return said + fresh, calls

    def finish(self) -> str:
        """Returns the text that was held back."""
        return "" if self._after_call and not self._held.strip() else self._held


def restore_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have their arguments as objects, as chat templates expect them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    restored = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _parse_object(function["arguments"])
            if arguments is not None:
                call = {**call, "function": {**function, "arguments": arguments}}
        restored.append(call)
    return {**message, "tool_calls": restored}


def _parse_call(block: str) -> ToolCall | None:
    call = _parse_object(block)
    if call is None or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return None
    return ToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False))


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # Python's parser accepts NaN and Infinity
