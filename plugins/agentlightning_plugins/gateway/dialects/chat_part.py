"""The parts of a ``chat.completion`` in their order, as APIs that list what they answer need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

PartKind: TypeAlias = Literal["reasoning", "text", "refusal", "tool_call"]


@dataclass(slots=True)
class Part:
    """A stretch of reasoning, of text or of refusal, or one tool call."""

    kind: PartKind
    index: int
    """Among all parts."""
    text: str = ""
    """So far; of a tool call its arguments."""
    call_id: str = ""
    name: str = ""
    """Of the tool that is called."""
    logprobs: list[Any] = field(default_factory=list)
    """Of its tokens, as Chat Completions tells them, where they are kept."""


class Step(NamedTuple):
    """One thing that happens to a part."""

    event: Literal["start", "delta", "stop"]
    part: Part
    delta: str = ""
    logprobs: tuple[Any, ...] = ()


class PartReader:
    """Cuts an answer, whole or in chunks, into parts. It reads one choice: the APIs it serves know no more."""

    def __init__(self, *, keeps_logprobs: bool = False) -> None:
        """Begins an answer.

        Args:
            keeps_logprobs: whether parts collect the log-probabilities of their tokens, which are most of an answer.
        """
        self._keeps_logprobs = keeps_logprobs
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.id: str = ""
        self.model: str = ""
        self.created: int = 0
        self.usage: Mapping[str, Any] = {}
        self.prompt_tokens: int = 0
        self.stop_sequence: str | None = None
        """The text that ended the answer, where the backend says so, as vLLM does."""
        self._open: Part | None = None
        self._calls: dict[int, Part] = {}

    def read_whole(self, answer: Mapping[str, Any]) -> None:
        """Reads a whole answer.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is none.
        """
        choices = [{**choice, "delta": choice["message"]} for choice in answer["choices"]]
        for choice in choices:
            calls = choice["delta"].get("tool_calls") or ()
            choice["delta"] = {
                **choice["delta"],
                "tool_calls": [{**call, "index": position} for position, call in enumerate(calls)],
            }
        for _ in self.feed({**answer, "choices": choices}):
            pass
        self._open = None

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Step]:
        """What a chunk adds; raises as ``read_whole``."""
        self.id = self.id or chunk.get("id") or ""
        self.model = self.model or chunk.get("model") or ""
        self.created = self.created or chunk.get("created") or 0
        self.usage = chunk.get("usage") or self.usage
        self.prompt_tokens = (
            self.usage.get("prompt_tokens") or self.prompt_tokens or len(chunk.get("prompt_token_ids") or ())
        )
        for choice in chunk.get("choices") or ():
            if not choice.get("index"):
                yield from self._read(choice)

    def close(self) -> Iterator[Step]:
        """Ends the part that is still open."""
        part, self._open = self._open, None
        if part is not None:
            yield Step("stop", part)

    def _read(self, choice: Mapping[str, Any]) -> Iterator[Step]:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if isinstance(choice.get("stop_reason"), str):
            self.stop_sequence = choice["stop_reason"]
        delta = choice.get("delta") or {}
        logprobs: tuple[Any, ...] = ()
        if self._keeps_logprobs:
            logprobs = tuple((choice.get("logprobs") or {}).get("content") or ())
        yield from self._add("reasoning", delta.get("reasoning_content") or delta.get("reasoning"))
        yield from self._add("text", delta.get("content"), logprobs)
        yield from self._add("refusal", delta.get("refusal"))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            yield from self._add_call(call.get("index", position), call)

    def _add(self, kind: PartKind, text: str | None, logprobs: tuple[Any, ...] = ()) -> Iterator[Step]:
        if not text:
            return
        part = self._open
        if part is None or part.kind != kind:
            yield from self.close()
            part = self._start(kind)
            yield Step("start", part)
        part.text += text
        part.logprobs += logprobs
        yield Step("delta", part, text, logprobs)

    def _add_call(self, position: int, call: Mapping[str, Any]) -> Iterator[Step]:
        function = call.get("function") or {}
        part = self._calls.get(position)
        if part is None:
            yield from self.close()
            part = self._calls[position] = self._start("tool_call")
            part.call_id = call.get("id") or f"call_{part.index}"
            part.name = function.get("name") or ""
            yield Step("start", part)
        elif part is not self._open:
            raise ValueError("the backend interleaves the tool calls of a stream")
        arguments = function.get("arguments")
        if arguments:
            part.text += arguments
            yield Step("delta", part, arguments)

    def _start(self, kind: PartKind) -> Part:
        part = self._open = Part(kind, len(self.parts))
        self.parts.append(part)
        return part
