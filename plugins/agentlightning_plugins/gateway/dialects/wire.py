"""JSON and server-sent events, as bytes."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Final

import orjson

from agentlightning.frozen import parse_lenient

parse_json = parse_lenient
"""Some model servers write NaN and infinities."""


def dump_json(value: Any) -> bytes:
    """Writes compact JSON. NaN becomes null; lone surrogates, which orjson refuses, are escaped."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def is_json(text: str) -> bool:
    """Whether a text is a whole JSON object, so that a tool call has all its arguments."""
    if not text.rstrip().endswith("}"):
        return False
    try:
        return isinstance(parse_json(text.encode()), dict)
    except ValueError:
        return False


_END: Final = re.compile(rb"\r?\n\r?\n")
DONE: Final = b"[DONE]"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_EVENT: Final = re.compile(rb"\s*(?:(?:data|event|id|retry) ?)?:")


class EventSplitter:
    """Splits a byte stream into whole events."""

    rest: bytes = b""
    """The beginning of an event that is not complete."""
    _has_begun = False

    def feed(self, piece: bytes) -> bytes:
        """Returns the events that this piece completes, each with the blank line that ends it."""
        text = self.rest + piece if self.rest else piece
        if not self._has_begun:
            self._has_begun = not BYTE_ORDER_MARK.startswith(text)
            text = text.removeprefix(BYTE_ORDER_MARK)
        searched = max(0, len(self.rest) - 3)  # the blank line may be cut anywhere
        if text.endswith(b"\n\n"):
            end = len(text)
        elif b"\r" in text:  # rare: compact JSON contains none
            end = max((match.end() for match in _END.finditer(text, searched)), default=0)
        else:
            end = text.rfind(b"\n\n", searched) + 2
            end = 0 if end == 1 else end
        self.rest = text[end:]
        return text[:end]


def split_events(text: bytes) -> list[bytes]:
    """Splits whole events, each with the blank line that ends it."""
    if b"\r" not in text:
        return [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]
    ends = [0, *(match.end() for match in _END.finditer(text))]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def event_data(event: bytes) -> bytes | None:
    """Returns the data of an event, of one or several lines; None for comments and other events without data."""
    if event.startswith(b"data:"):
        data = event[5:].strip()
        if b"\n" not in data:
            return data
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line[5:].strip() for line in lines) if lines else None


def replace_data(event: bytes, data: bytes) -> bytes:
    """Returns an event with other data; its other lines stay."""
    others = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*others, to_event(data)])


def looks_like_events(body: bytes) -> bool:
    """Whether a body of unknown type begins like a stream of events."""
    return _EVENT.match(body) is not None


def read_events(body: bytes) -> list[Any]:
    """Returns the JSON of the events of a whole stream; raises ValueError."""
    found = [event_data(event) for event in split_events(EventSplitter().feed(body + b"\n\n"))]
    return [parse_json(data) for data in found if data is not None and data != DONE]


def to_event(data: bytes) -> bytes:
    """Writes an event with one line of data."""
    return b"data: %b\n\n" % data


def to_typed_event(kind: str, **fields: Any) -> bytes:
    """Writes an event whose type is both the name of the event and a field of its JSON."""
    return b"event: %b\n%b" % (kind.encode(), to_event(dump_json({"type": kind, **fields})))
