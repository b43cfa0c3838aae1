"""Incremental decoding of a response into text and tool calls; whole answers and streams use the same reader."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentlightning_algorithms.grpo.server.tool_call import ToolCallReader

Json = dict[str, Any]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


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
        """Takes more tokens and returns the text that is certain."""
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
        # Decoders treat the first token differently, so the tokens before the new ones are decoded with them.
        known, both = (
            str(self._tokenizer.decode(self._token_ids[self._before : end], skip_special_tokens=True))
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


class ReplyReader:
    """Reads one response: its text, and its tool calls where the request has tools.

    Attributes:
        text: the text so far.
        calls: the tool calls so far, in OpenAI's format.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], *, tools: bool) -> None:
        self.text = ""
        self.calls: list[Json] = []
        self._reader = TextReader(tokenizer, stop)
        self._call_reader = ToolCallReader() if tools else None

    def feed(self, token_ids: Sequence[int]) -> tuple[str, list[Json]]:
        """Takes more tokens and returns the text and the calls that are certain."""
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
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        self.text += text
        self.calls += calls
        return text, calls
