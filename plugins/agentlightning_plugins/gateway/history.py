"""Restores the history of a request: what the model saw and sampled before keeps its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import orjson

from agentlightning.frozen import FrozenNumbers
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.dialects.dialect import UNPARSED, Completion, CompletionChoice
from agentlightning_plugins.gateway.dialects.wire import dump_json
from agentlightning_plugins.shared.presets.volatile import settle

LateSystem: TypeAlias = Literal["keep", "user"]
_MAX_REMEMBERED: Final = 2**26
"""Characters of tool arguments that are kept to be restored."""
_MAX_PROMPT_BYTES: Final = 2**24
"""JSON of token ids of prompts that is kept to find what they share. In memory, the ids take eight times as much."""
_MAX_ID: Final = 2**31
_IDS: Final = b'"prompt_token_ids":'
_BACKSLASH: Final = ord("\\")
_CUT: Final = b'"..."'
_PUT: Final[list[Any]] = ["..."]
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

        self._prompts: dict[AttemptKey, tuple[bytes, FrozenNumbers]] = {}
        """For each attempt, the token ids of its last prompt, and their JSON without brackets."""
        self._prompt_bytes = 0

    def cut_prompt(self, attempt: AttemptKey, answer: bytes) -> tuple[bytes, FrozenNumbers | None]:
        """Replaces the token ids of the prompt in an answer, or in an event of a stream, by ``_CUT``.

        Returns the cut text and the ids, for ``put_prompt``; without such ids, the given text and None. A prompt of a
        long conversation has tens of thousands of ids, and begins with the previous prompt, whose ids it shares: only
        its end is parsed.
        """
        name = answer.find(_IDS)
        start, end = answer.find(b"[", name) + 1, answer.find(b"]", name)
        if (
            name <= 0
            or not 0 < start <= end
            or answer[name - 1] == _BACKSLASH
            or answer[name + len(_IDS) : start - 1].strip()
        ):
            return answer, None
        text = answer[start:end]
        last, ids = self._prompts.get(attempt, (b"", FrozenNumbers()))
        if not last or not text.startswith(last) or text[len(last) : len(last) + 1] not in (b"", b","):
            last, ids = b"", FrozenNumbers()
        try:
            more = orjson.loads(b"[0%b]" % text[len(last) :])[1:] if last else orjson.loads(b"[%b]" % text)
        except ValueError:
            return answer, None
        if more:
            if set(map(type, more)) != {int} or min(more) < 0 or max(more) >= _MAX_ID:
                return answer, None
            ids = FrozenNumbers(ids + more)
        self._prompt_bytes += len(text) - len(self._prompts.pop(attempt, (b"",))[0])
        self._prompts[attempt] = text, ids
        while self._prompt_bytes > _MAX_PROMPT_BYTES:
            self._prompt_bytes -= len(self._prompts.pop(next(iter(self._prompts)))[0])
        return answer[:start] + _CUT + answer[end:], ids

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


def put_prompt(completion: Completion, ids: FrozenNumbers | None) -> None:
    """Puts the token ids of a prompt where they were cut out of the answer that was read."""
    holders: list[Completion | CompletionChoice] = [completion, *completion.choices.values()]
    for holder in holders if ids is not None else ():
        if holder.prompt_token_ids == _PUT:
            holder.prompt_token_ids = ids


def _to_forms(arguments: str) -> dict[str, str]:
    """Returns the normal forms of sampled arguments: as sampled, and as shown by APIs that take only objects."""
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
