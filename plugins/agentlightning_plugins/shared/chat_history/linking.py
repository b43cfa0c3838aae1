"""Finds, for each model call, the earlier call whose conversation it continues, by comparing messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.semconv import Message
from agentlightning.types import Triplet


def link_calls(triplets: Sequence[Triplet]) -> list[int | None]:
    """Finds, for each triplet, the latest earlier triplet whose prompt and answer are a prefix of its prompt.

    Takes time linear in the messages. Ignores ids of tool calls and the model's reasoning: clients drop or change them.
    """
    by_answer: dict[tuple[int, str], list[int]] = {}
    previous: list[int | None] = []
    for position, triplet in enumerate(triplets):
        messages = read_messages(triplet)
        previous.append(_find_previous(messages, triplets, by_answer))
        answer = read_answer(triplet)
        if messages and answer is not None:
            by_answer.setdefault((len(messages), _signature(answer)), []).append(position)
    return previous


def read_messages(triplet: Triplet) -> Sequence[Message]:
    """Returns the messages of the prompt; empty if they were not recorded."""
    content = triplet.prompt.get("raw_content") if isinstance(triplet.prompt, Mapping) else None
    return content if isinstance(content, list) else ()


def read_answer(triplet: Triplet) -> Message | None:
    """Returns the model's answer, if it was recorded."""
    content = triplet.response.get("raw_content") if isinstance(triplet.response, Mapping) else None
    return content[0] if isinstance(content, list) and content else None


def find_first_edit(earlier: Sequence[Message], later: Sequence[Message]) -> int | None:
    """Returns the position of the first message that differs in the later history; None if messages were only added."""
    for position, message in enumerate(earlier):
        if position >= len(later) or _signature(message) != _signature(later[position]):
            return position
    return None


def _find_previous(
    messages: Sequence[Message], triplets: Sequence[Triplet], by_answer: Mapping[tuple[int, str], Sequence[int]]
) -> int | None:
    for length in range(len(messages) - 1, 0, -1):
        if messages[length].get("role") != "assistant":
            continue
        for position in reversed(by_answer.get((length, _signature(messages[length])), ())):
            if find_first_edit(read_messages(triplets[position]), messages[:length]) is None:
                return position
    return None


def _signature(message: Message) -> str:
    """Returns the parts of a message that are equal in all of its copies."""
    content: Any = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    calls = [
        (call.get("function", {}).get("name"), call.get("function", {}).get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return repr((message.get("role"), content, calls))
