"""Server-sent events, as far as model APIs use them."""

from __future__ import annotations

import itertools
import re
from typing import Final

_END: Final = re.compile(rb"\r?\n\r?\n")
DONE: Final = b"[DONE]"


class EventSplitter:
    """Finds the whole events in a byte stream, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The events that this piece completes, each with the blank line that ends it."""
        text = self._rest + piece if self._rest else piece
        searched = max(0, len(self._rest) - 3)  # an end may be cut anywhere
        if text.endswith(b"\n\n"):
            end = len(text)
        elif b"\r" in text:  # JSON has none: nearly no stream has any
            end = max((match.end() for match in _END.finditer(text, searched)), default=0)
        else:
            end = text.rfind(b"\n\n", searched) + 2
            end = 0 if end == 1 else end
        self._rest = text[end:]
        return text[:end]

    @property
    def rest(self) -> bytes:
        """What has arrived of an event that is not complete."""
        return self._rest


def split_events(text: bytes) -> list[bytes]:
    """Whole events, one by one, each with the blank line that ends it."""
    if b"\r" not in text:
        return [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]
    ends = [0, *(match.end() for match in _END.finditer(text))]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def event_data(event: bytes) -> bytes | None:
    """The data of an event that has exactly one data line; None for comments and others."""
    if event.startswith(b"data:"):
        data = event[5:].strip()
        return data if b"\n" not in data else None
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    return lines[0][5:].strip() if len(lines) == 1 else None


def to_event(data: bytes) -> bytes:
    """An event with one line of data."""
    return b"data: %b\n\n" % data
