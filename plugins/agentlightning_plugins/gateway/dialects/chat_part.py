"""The base of translations between Chat Completions and APIs whose answers list their parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from agentlightning_plugins.gateway.dialects.dialect import UNPARSED, CompletionChoice, flatten, read_reasoning
from agentlightning_plugins.gateway.dialects.openai import to_chunk
from agentlightning_plugins.gateway.dialects.wire import dump_json, is_json, parse_json

_FAILED = "Error: "
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
    is_started: bool = False
    """Whether events of the part were sent. A tool call starts with its arguments, when its whole name is known."""
    waiting: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    """Text, with its log-probabilities, that was not sent yet, because an earlier tool call has not ended."""


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
        self._number_ended = 0
        """Number of parts that have ended. The part after them is open, and later ones wait."""
        self._number_seen = 0
        """Number of parts when the open call was last examined."""
        self._choice = CompletionChoice()
        """Only its tool calls are used."""
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

    def _begin(self) -> bytes:
        """Returns the events that begin a stream."""
        return b""

    def _start(self, part: Part) -> bytes:
        """Returns the events that begin a part, which is still empty."""
        return b""

    @abstractmethod
    def _add(self, part: Part, text: str, logprobs: Sequence[Any]) -> bytes:
        """Returns the event for text that was added to a part."""

    @abstractmethod
    def _stop(self, part: Part) -> bytes:
        """Returns the events that end a part."""

    def _read_whole(self, answer: Mapping[str, Any]) -> None:
        """Reads a whole answer; raises ``MALFORMED``."""
        for choice in answer["choices"]:
            choice["message"]  # raises KeyError: the answer is of another API
        self._has_begun = True
        self.feed(to_chunk(answer))
        self._end_parts()

    def _end_parts(self) -> bytes:
        """Returns the events that end all parts."""
        return b"".join(self._advance(is_end=True))

    def _read(self, choice: Mapping[str, Any]) -> Iterator[bytes]:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if isinstance(choice.get("stop_reason"), str):
            self._stop_sequence = choice["stop_reason"]
        delta = flatten(choice.get("delta") or {})
        logprobs = (choice.get("logprobs") or {}).get("content") or () if self._keeps_logprobs else ()
        yield from self._read_text("reasoning", read_reasoning(delta))
        yield from self._read_text("text", delta.get("content"), logprobs)
        yield from self._read_text("refusal", delta.get("refusal"))
        for position, arguments in self._choice.add_tool_calls(delta):
            call = self._choice.tool_calls[position]
            part = self._calls.get(position) or self._calls.setdefault(position, self._new_part("tool_call"))
            if not part.is_started:
                part.call_id, part.name = call.id or f"call_{part.index}", call.name
            yield from self._add_text(part, arguments)

    def _read_text(self, kind: PartKind, text: str | None, logprobs: Sequence[Any] = ()) -> Iterator[bytes]:
        if not text:
            return
        part = self._parts[-1] if self._parts else None
        if part is None or part.kind != kind:
            part = self._new_part(kind)
        yield from self._add_text(part, text, logprobs)

    def _add_text(self, part: Part, text: str, logprobs: Sequence[Any] = ()) -> Iterator[bytes]:
        if part.index < self._number_ended and text.strip():
            raise ValueError(f"the backend continues the call of {part.name!r} after its arguments have ended")
        if text:
            part.waiting.append((text, logprobs))
        yield from self._advance(is_end=False)

    def _advance(self, *, is_end: bool) -> Iterator[bytes]:
        """Sends the text of the open part; ends it if another one waits, unless it is a call that lacks arguments."""
        while self._number_ended < len(self._parts):
            part = self._parts[self._number_ended]
            if not part.is_started and (part.waiting or is_end):
                part.is_started = True
                yield self._start(part)
            is_changed = bool(part.waiting)
            for text, logprobs in part.waiting:
                part.text += text
                part.logprobs += logprobs
                yield self._add(part, text, logprobs)
            part.waiting.clear()
            if not is_end and (part is self._parts[-1] or not self._has_ended(part, is_changed)):
                break
            self._number_ended += 1
            yield self._stop(part)

    def _has_ended(self, part: Part, is_changed: bool) -> bool:
        """Whether an open part has all its text; parses the arguments of a call, but only if there is something new."""
        if part.kind != "tool_call":
            return True
        is_new, self._number_seen = is_changed or len(self._parts) > self._number_seen, len(self._parts)
        return is_new and is_json(part.text)

    def _new_part(self, kind: PartKind) -> Part:
        part = Part(kind, len(self._parts))
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
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def to_tool_result(output: Any, to_part: Callable[[Mapping[str, Any]], dict[str, Any]], *, has_failed: bool) -> Any:
    """Translates the output of a tool: parts stay parts; what chat messages have no parts for becomes JSON.

    Chat messages have no field for a failure, so the text says it.
    """
    if isinstance(output, dict) and output.get("image_url"):  # a screenshot
        output = [{**output, "type": "input_image"}]
    is_parts = isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output)
    content = to_content(output, to_part) if is_parts else "" if output is None else output
    content = content if isinstance(content, str) or is_parts else dump_json(content).decode()
    if not has_failed:
        return content
    return [{"type": "text", "text": _FAILED}, *content] if isinstance(content, list) else f"{_FAILED}{content}"


def parse_arguments(text: str) -> dict[str, Any]:
    """Parses tool arguments; text that is not a JSON object is kept under a key, since the API takes only objects."""
    try:
        arguments = parse_json(text, exact=True) if text else {}
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {UNPARSED: text}
