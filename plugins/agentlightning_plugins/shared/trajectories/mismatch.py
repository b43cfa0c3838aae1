"""Explains why a prompt does not start with the tokens of the call that its messages continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from agentlightning.types import Triplet
from agentlightning_plugins.shared.chat_history.linking import find_first_edit, read_answer, read_messages

MismatchKind: TypeAlias = Literal["template", "retokenisation", "other"]
"""``template``: the chat template renders past messages differently, such as without their reasoning.
``retokenisation``: the same text became other tokens. ``other``: the agent changed the conversation."""

_RUN: Final = 8
"""Number of equal tokens after which two sequences count as realigned."""
_MAX_SHIFT: Final = 24
"""Maximum number of differing tokens on either side before the sequences realign."""


class Mismatch(NamedTuple):
    """A call that continues a conversation but starts a new trajectory."""

    kind: MismatchKind
    response_id: str | None
    """Response id of this call."""
    previous_response_id: str | None
    """Response id of the call whose conversation this call continues."""
    position: int
    """Index of the first token of the prompt that differs; for an edited history, index of the first message."""
    explanation: str
    """One sentence for users."""


def explain_mismatch(
    previous: Triplet, triplet: Triplet, decode: Callable[[Sequence[int]], str] | None = None
) -> Mismatch:
    """Explains why a prompt does not start with the prompt and the response of the call that its messages continue."""
    expected = [*previous.prompt["token_ids"], *previous.response["token_ids"]]
    prompt = triplet.prompt["token_ids"]
    position = next((i for i, (a, b) in enumerate(zip(expected, prompt, strict=False)) if a != b), None)
    if position is None:
        position = min(len(expected), len(prompt))
    kind = _by_tokens(expected, prompt, position, len(previous.prompt["token_ids"]))
    if decode is not None and decode(prompt).startswith(decode(expected)):
        kind = "retokenisation"
    elif decode is not None and kind == "retokenisation":
        kind = "template"
    if len(prompt) > position == len(expected):
        kind, text = "other", "an earlier call continued from the same point"
    elif kind == "template":
        where = "the answer" if position >= len(previous.prompt["token_ids"]) else "what came before the answer"
        text = f"the chat template renders {where} differently once it is history, from token {position} on"
    elif kind == "retokenisation":
        text = f"the text of the answer became other tokens when it was sent back, from token {position} on"
    else:
        text = f"its tokens differ from token {position} on and do not realign"
    return Mismatch(kind, _id(triplet), _id(previous), position, text)


def explain_edit(position: int, triplets: Sequence[Triplet], openings: dict[tuple[Any, str], int]) -> list[Mismatch]:
    """Returns a mismatch if a call that continues no earlier call has an edited history.

    ``openings`` maps each agent and its first messages to the latest such call, and is updated.
    """
    triplet = triplets[position]
    messages = read_messages(triplet)
    opening = messages[: next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), None)]
    if not opening:
        return []
    key = (triplet.metadata.get("agent_name"), repr([(m.get("role"), m.get("content")) for m in opening]))
    before = openings.get(key)
    openings[key] = position
    if before is None or len(opening) == len(messages):  # a new conversation
        return []
    previous = triplets[before]
    answer = read_answer(previous)
    history = [*read_messages(previous), *([] if answer is None else [answer])]
    edited = find_first_edit(history, messages)
    at = len(opening) if edited is None else edited
    text = f"the agent changed the history of the conversation, from message {at} on"
    return [Mismatch("other", _id(triplet), _id(previous), at, text)]


def _by_tokens(expected: Sequence[int], prompt: Sequence[int], position: int, response_start: int) -> MismatchKind:
    """Determines the kind of a mismatch from how the two sequences realign after they differ.

    Replaced tokens come from the tokenizer; tokens that are only removed or only added, or a difference outside the
    response, come from the template.
    """
    if position < response_start or position >= len(expected) - 1:
        return "template"
    for shift in range(1, 2 * _MAX_SHIFT + 1):
        for skipped in range(max(0, shift - _MAX_SHIFT), min(shift, _MAX_SHIFT) + 1):
            added = shift - skipped
            rest = expected[position + skipped : position + skipped + _RUN]
            if not rest or list(prompt[position + added : position + added + len(rest)]) != rest:
                continue
            return "retokenisation" if skipped and added else "template"
    removed = _find_run(expected, prompt[position : position + _RUN], position)
    return "template" if removed else "other"


def _find_run(ids: Sequence[int], run: Sequence[int], start: int) -> bool:
    run = list(run)
    return bool(run) and any(ids[i] == run[0] and list(ids[i : i + len(run)]) == run for i in range(start, len(ids)))


def _id(triplet: Triplet) -> str | None:
    value = triplet.metadata.get("response_id")
    return None if value is None else str(value)
