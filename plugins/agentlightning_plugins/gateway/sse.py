"""Server-sent events, as far as model APIs use them."""

from __future__ import annotations

import re
from typing import Final

_END: Final = re.compile(rb"\r?\n\r?\n")
DONE: Final = b"[DONE]"


class EventSplitter:
    """Cuts a byte stream into events, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes, each with the blank line that ends it."""
        text = self._rest + piece if self._rest else piece
        if b"\r" not in text:  # JSON has none: nearly no stream has any
            *events, self._rest = text.split(b"\n\n")
            return [event + b"\n\n" for event in events]
        searched = max(0, len(self._rest) - 3)  # an end may be cut anywhere
        events, start = [], 0
        for end in _END.finditer(text, searched):
            events.append(text[start : end.end()])
            start = end.end()
        self._rest = text[start:]
        return events

    @property
    def rest(self) -> bytes:
        """What has arrived of an event that is not complete."""
        return self._rest


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
