"""Tool calls as models of the Hermes family write them.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Models of this family are trained on it by their chat templates (Qwen 2.5 and 3 among them).
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    """A call the model asks for."""

    name: str
    arguments: str
    """A JSON object, as the OpenAI API carries it."""


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Takes the tool calls out of a response.

    Returns:
        What is left of the text, and the calls in order. A block that is no JSON object with a name and an object of
        arguments stays in the text as it was, for the agent to see.
    """
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        call = _parse_call(block[1])
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    rest = _BLOCK.sub(take, text)
    return (rest.strip() if calls else text), calls


def restore_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls carry their arguments as objects, as chat templates expect them."""
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
    """NaN and Infinity are Python's, not JSON's: nobody else could read them back."""
    raise ValueError(f"{name} is not JSON")
