"""Answers of a scripted model server, and their tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

EOS: Final = 256
"""The token that ends every answer."""
CHUNK_CHARS: Final = 4
"""Characters of text per streamed chunk."""


def encode(text: str) -> list[int]:
    """Returns the tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(token_ids: Sequence[int]) -> str:
    """Returns the text of tokens, without ``EOS``."""
    return bytes(token for token in token_ids if token != EOS).decode()


def logprob(token_id: int) -> float:
    """Returns the log-probability of a token; exact in binary, so tests can use ``==``."""
    return -(token_id % 15 + 1) / 16


def render_prompt(body: Mapping[str, Any]) -> str:
    """Returns the text of a request's prompt."""
    if "messages" not in body:
        return str(body["prompt"])
    return "".join(f"<{m['role']}>{m.get('content') or ''}" for m in body["messages"]) + "<assistant>"


def to_text(arguments: str | Mapping[str, Any]) -> str:
    """Returns the arguments of a tool call as they are sent."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def cut(text: str) -> Iterator[str]:
    """Splits a text into pieces of ``CHUNK_CHARS``."""
    for start in range(0, len(text), CHUNK_CHARS):
        yield text[start : start + CHUNK_CHARS]


@dataclass(frozen=True)
class RecordedRequest:
    """A request of a client."""

    path: str
    """Path, including the query."""
    headers: Mapping[str, str]
    """Headers by case-insensitive name."""
    raw: bytes
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The server's reaction to one request. The fields from ``status`` on make the server misbehave."""

    content: str | None = None
    """Default: None with tool calls or a refusal, else ``ok``."""
    tool_calls: Sequence[tuple[str, str | Mapping[str, Any]]] = ()
    """Name and arguments of each call. Arguments that are text are sent unchanged, even if they are not JSON."""
    finish_reason: str | None = None
    """Default: ``tool_calls`` if there are any, else ``stop``."""
    reasoning: str | None = None
    """Reasoning text; its tokens come first."""
    refusal: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level fields of the answer, such as ``weight_version``."""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    """Delay before the status line."""
    until: asyncio.Event | None = None
    """Event to wait for after the delay."""
    chunk_delay_s: float = 0.0
    """Delay before each chunk of a stream except the first."""
    status: int = 200
    error: str = "scripted error"
    """The message when ``status`` is an error."""
    cut_after: int | None = None
    """Disconnects after this many chunks of a stream, or halfway through a body; 0: before the status line."""
    body: bytes | None = None
    """Sent unchanged instead of the answer."""
    content_type: str = "application/json"
    """Content type of ``body``."""

    def text(self, index: int = 0) -> str | None:
        """Returns the text of choice ``index``; texts other than the first contain their index."""
        content = self.content
        if content is None:
            if self.tool_calls or self.refusal:
                return None
            content = "ok"
        return content if index == 0 else f"{content} #{index}"

    def count_tokens(self) -> int:
        """Returns the number of tokens of choice 0, including ``EOS``."""
        text = (self.reasoning or "") + (self.text() or "") + (self.refusal or "")
        calls = [f"<tool_call>{name}{to_text(arguments)}" for name, arguments in self.tool_calls]
        return len(encode(text + "".join(calls))) + 1
