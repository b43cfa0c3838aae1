"""Restores the history of a request: what the model saw and sampled before keeps its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.dialects.dialect import UNPARSED, Completion
from agentlightning_plugins.gateway.dialects.wire import dump_json
from agentlightning_plugins.shared.presets.volatile import settle

LateSystem: TypeAlias = Literal["keep", "user"]
_MAX_REMEMBERED: Final = 2**26
"""Characters of tool arguments that are kept to be restored."""
_INPUT: Final = "input"  # the key under which custom tools of Responses get their text


class SampledHistory:
    """Makes the history of a request begin with what the model saw and sampled before, so that tokens stay the same.

    Some agents send the arguments of a tool call back as other JSON that means the same: they get the sampled text
    again, by the id of the call. Parts of system messages that change with every call get a fixed value. System
    messages after the first other message become the user's, for chat templates that refuse them.
    """

    def __init__(self, late_system: LateSystem = "keep", max_chars: int = _MAX_REMEMBERED) -> None:
        self._late_system = late_system
        self._max_chars, self._chars = max_chars, 0
        self._known: dict[tuple[AttemptKey, str], Mapping[str, str]] = {}
        """For each attempt and id of a call, the sampled text by the normal forms in which it may come back."""

    def remember(self, attempt: AttemptKey, completion: Completion) -> None:
        """Keeps the tool calls of an answer, and forgets the oldest calls if there are too many."""
        for choice in completion.choices.values():
            for call in choice.tool_calls.values():
                if call.id is not None:
                    forms = self._forget((attempt, call.id)) | _to_forms(call.arguments)
                    self._known[attempt, call.id] = forms
                    self._chars += _count_chars(forms)
        while self._chars > self._max_chars:
            self._forget(next(iter(self._known)))

    def _forget(self, key: tuple[AttemptKey, str]) -> dict[str, str]:
        forms = self._known.pop(key, {})
        self._chars -= _count_chars(forms)
        return dict(forms)

    def restore(self, attempt: AttemptKey, messages: Sequence[Any]) -> list[Any]:
        """Returns the messages of a chat request as the model should get them."""
        restored, is_late = list[Any](), False
        for message in messages:
            if not isinstance(message, dict):
                restored.append(message)
                continue
            if isinstance(message.get("tool_calls"), list):
                calls = [self._restore_call(attempt, call) for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            thoughts = message.get("reasoning_content") or message.get("reasoning")
            if thoughts and isinstance(thoughts, str):
                message = {**message, "reasoning_content": thoughts, "reasoning": thoughts}  # servers read one of them
            if message.get("role") not in ("system", "developer"):
                is_late = True
            elif is_late and self._late_system == "user":
                message = {**message, "role": "user"}
            else:
                message = {**message, "content": settle(message.get("content"))}
            restored.append(message)
        return restored

    def _restore_call(self, attempt: AttemptKey, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id"), str):
            return call
        forms, text = self._known.get((attempt, call["id"]), {}), function.get("arguments")
        if not forms or not isinstance(text, str) or text in forms.values():
            return call
        sampled = forms.get(_normal_form(text) or "")
        return call if sampled is None else {**call, "function": {**function, "arguments": sampled}}


def _to_forms(arguments: str) -> dict[str, str]:
    """Returns the normal forms of sampled arguments: as they are, and as APIs show them that take only objects."""
    shown = [arguments or "{}", *(dump_json({key: arguments}).decode() for key in (UNPARSED, _INPUT))]
    return {form: arguments for text in shown if (form := _normal_form(text)) is not None}


def _count_chars(forms: Mapping[str, str]) -> int:
    return sum(len(form) + len(text) for form, text in forms.items())


def _normal_form(text: str) -> str | None:
    """Returns a text that is the same for equal JSON, as for JavaScript's 1 and 1.0; None if it is not JSON."""
    try:
        read = json.loads(
            text, parse_float=lambda digits: int(value) if (value := float(digits)).is_integer() else value
        )
        return json.dumps(read, sort_keys=True)
    except (ValueError, RecursionError):
        return None
