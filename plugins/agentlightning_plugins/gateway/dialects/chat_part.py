"""The base of translations between Chat Completions and APIs whose answers list their parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

PartKind: TypeAlias = Literal["reasoning", "text", "refusal", "tool_call"]


@dataclass(slots=True)
class Part:
    """A stretch of reasoning, text or refusal, or one tool call."""

    kind: PartKind
    index: int
    """Index among all parts of the answer."""
    text: str = ""
    """The text so far; for a tool call, its arguments."""
    call_id: str = ""
    name: str = ""
    """Name of the called tool."""
    logprobs: list[Any] = field(default_factory=list)
    """Log-probabilities of the part's tokens, as in Chat Completions; empty if they are not kept."""


class PartTranslation(ABC):
    """Base of translations to APIs whose answers list their parts. These APIs have only one choice."""

    _keeps_logprobs = False
    """Whether parts collect the log-probabilities of their tokens, which make up most of an answer's bytes."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._parts: list[Part] = []
        self._finish_reason: str | None = None
        self._id: str = ""
        self._model: str = ""
        self._created: int = 0
        self._usage: Mapping[str, Any] = {}
        self._prompt_tokens: int = 0
        self._stop_sequence: str | None = None
        """The text that ended the answer, if the backend states it, as vLLM does."""
        self._open: Part | None = None
        self._calls: dict[int, Part] = {}
        self._has_begun = False

    def feed(self, chunk: Mapping[str, Any]) -> bytes:
        """Translates a ``chat.completion.chunk`` to server-sent events; raises ``MALFORMED``."""
        self._id = self._id or chunk.get("id") or ""
        self._model = self._model or chunk.get("model") or ""
        self._created = self._created or chunk.get("created") or 0
        self._usage = chunk.get("usage") or self._usage
        self._prompt_tokens = (
            self._usage.get("prompt_tokens") or self._prompt_tokens or len(chunk.get("prompt_token_ids") or ())
        )
        events = [] if self._has_begun else [self._begin()]
        self._has_begun = True
        for choice in chunk.get("choices") or ():
            if not choice.get("index"):
                events += self._read(choice)
        return b"".join(events)

    @abstractmethod
    def _begin(self) -> bytes:
        """Returns the events that begin a stream."""

    @abstractmethod
    def _start(self, part: Part) -> bytes:
        """Returns the events that begin a part, which is still empty."""

    @abstractmethod
    def _add(self, part: Part, text: str, logprobs: Sequence[Any]) -> bytes:
        """Returns the event for text that was added to a part."""

    @abstractmethod
    def _stop(self, part: Part) -> bytes:
        """Returns the events that end a part."""

    def _read_whole(self, answer: Mapping[str, Any]) -> None:
        """Reads a whole answer; raises ``MALFORMED``."""
        choices = []
        for choice in answer["choices"]:
            message = choice["message"]
            calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
            choices.append({**choice, "delta": {**message, "tool_calls": calls}})
        self._has_begun = True
        self.feed({**answer, "choices": choices})

    def _stop_open_part(self) -> bytes:
        part, self._open = self._open, None
        return b"" if part is None else self._stop(part)

    def _read(self, choice: Mapping[str, Any]) -> Iterator[bytes]:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if isinstance(choice.get("stop_reason"), str):
            self._stop_sequence = choice["stop_reason"]
        delta = choice.get("delta") or {}
        logprobs = (choice.get("logprobs") or {}).get("content") or () if self._keeps_logprobs else ()
        yield from self._read_text("reasoning", delta.get("reasoning_content") or delta.get("reasoning"))
        yield from self._read_text("text", delta.get("content"), logprobs)
        yield from self._read_text("refusal", delta.get("refusal"))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._read_call(call.get("index", position), call)

    def _read_text(self, kind: PartKind, text: str | None, logprobs: Sequence[Any] = ()) -> Iterator[bytes]:
        if not text:
            return
        part = self._open
        if part is None or part.kind != kind:
            yield self._stop_open_part()
            part = self._new_part(kind)
            yield self._start(part)
        part.text += text
        part.logprobs += logprobs
        yield self._add(part, text, logprobs)

    def _read_call(self, position: int, call: Mapping[str, Any]) -> Iterator[bytes]:
        function = call.get("function") or {}
        part = self._calls.get(position)
        if part is None:
            yield self._stop_open_part()
            part = self._calls[position] = self._new_part("tool_call")
            part.call_id = call.get("id") or f"call_{part.index}"
            part.name = function.get("name") or ""
            yield self._start(part)
        elif part is not self._open:
            raise ValueError("the backend interleaves the tool calls of a stream")
        arguments = function.get("arguments")
        if arguments:
            part.text += arguments
            yield self._add(part, arguments, ())

    def _new_part(self, kind: PartKind) -> Part:
        part = self._open = Part(kind, len(self._parts))
        self._parts.append(part)
        return part


def take(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def to_content(content: Any, to_part: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Translates the parts of a message; a single text becomes a plain string."""
    if not isinstance(content, list):
        return content
    parts = [to_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def to_tool_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Returns a tool call of a chat message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
