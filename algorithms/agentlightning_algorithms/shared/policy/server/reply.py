"""Incremental decoding of a response into text and tool calls; whole answers and streams use the same reader.

Tool calls are in the format of the Hermes family, which the chat templates of Qwen 2.5 and 3 use, too:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class TextReader:
    """Decodes tokens incrementally, up to the first stop string.

    Text is held back while it ends in an incomplete character or may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._before = self._read = 0
        self._held = ""
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes more tokens and returns the text that is final."""
        self._token_ids.extend(token_ids)
        fresh = self._decode()
        if fresh.endswith(_UNFINISHED):
            return ""
        self._before, self._read = self._read, len(self._token_ids)
        return self._cut(fresh)

    def finish(self) -> str:
        """Returns the text that was held back."""
        text = self._cut(self._decode())
        return text if self._stopped else text + self._held

    def _decode(self) -> str:
        if self._read == len(self._token_ids):
            return ""
        # Decoders treat the first token differently, so the tokens before the new ones are decoded with them.
        known, both = (
            str(self._tokenizer.decode(self._token_ids[self._before : end], skip_special_tokens=True))
            if end > self._before
            else ""
            for end in (self._read, len(self._token_ids))
        )
        return both[len(known) :]

    def _cut(self, fresh: str) -> str:
        if self._stopped or not self._stop:
            return "" if self._stopped else fresh
        text = self._held + fresh
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self._stopped, self._held = True, ""
            return text[: min(ends)]
        longest = min(len(text), max(map(len, self._stop)) - 1)
        hold = next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


class ParsedToolCall(NamedTuple):
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

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
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


class ReplyReader:
    """Reads one response: its text, and its tool calls where ``max_calls`` is not 0.

    Attributes:
        text: the text so far.
        calls: the first ``max_calls`` tool calls so far, in OpenAI's format.
        dropped: the number of further tool calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], max_calls: float) -> None:
        self.text = ""
        self.calls: list[Json] = []
        self.dropped = 0
        self._max_calls = max_calls
        self._reader = TextReader(tokenizer, stop)
        self._call_reader = ToolCallReader() if max_calls else None

    def feed(self, token_ids: Sequence[int]) -> tuple[str, list[Json]]:
        """Takes more tokens and returns the text and the calls that are final."""
        return self._add(self._reader.feed(token_ids), last=False)

    def finish(self) -> tuple[str, list[Json]]:
        """Returns what was held back."""
        return self._add(self._reader.finish(), last=True)

    def message(self) -> Json:
        """Returns the response as a message."""
        message: Json = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _add(self, text: str, *, last: bool) -> tuple[str, list[Json]]:
        calls: list[Json] = []
        if self._call_reader is not None:
            text, found = self._call_reader.feed(text)
            if last:
                text += self._call_reader.finish()
            for call in found:
                if len(self.calls) + len(calls) >= self._max_calls:
                    self.dropped += 1
                    continue
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        self.text += text
        self.calls += calls
        return text, calls


def restore_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have arguments as objects, which chat templates expect."""
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


def _parse_call(block: str) -> ParsedToolCall | None:
    call = _parse_object(block)
    if call is None or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return None
    return ParsedToolCall(call["name"], json.dumps(call["arguments"], ensure_ascii=False))


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # Python's parser accepts NaN and Infinity
