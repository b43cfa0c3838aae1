"""Parses runs of stream chunks that differ only in their single choice.

The bytes around the choices are the same in each chunk, so a run is parsed as one chunk with many choices, and these
bytes are copied when it is written. This saves most of the JSON work of a stream.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from orjson import JSONDecodeError, dumps, loads

from agentlightning_plugins.gateway.dialects.wire import to_event

_DATA: Final = b"data: "
_HEAD: Final = _DATA + b"{"
_CHOICES: Final = b'"choices":['
_END: Final = b"\n\n"


class ChunkRun(NamedTuple):
    """One event of an OpenAI stream, or several with one choice each."""

    chunk: dict[str, Any]
    """The choices of all events in order, and the fields that are the same in all."""
    rest: bytes
    """The events after the run."""
    around: tuple[bytes, bytes] | None = None
    """The bytes before and after the choice of each event; None for a single event."""

    def write(self, *, as_around: bool) -> bytes:
        """Writes the events with the current ``chunk``; ``as_around`` means that only its choices have changed."""
        if self.around is None:
            return to_event(dumps(self.chunk))
        choices = self.chunk["choices"]
        if not as_around:
            return b"".join([to_event(dumps(self.chunk | {"choices": [choice]})) for choice in choices])
        head, tail = self.around
        return b"%b%b%b" % (head, (tail + head).join(map(dumps, choices)), tail)


def find_run(events: bytes, *, is_alone: bool) -> ChunkRun | None:
    """Finds the run at the start of whole server-sent events; None if the first event has another form.

    With ``is_alone``, the run is one event: the first event of a stream has other fields than the following ones.
    """
    if not events.startswith(_HEAD):
        return None
    end = events.find(_END) + len(_END)
    if not is_alone and end < len(events):
        run = _find_several(events, end)
        if run is not None:
            return run
    try:
        chunk = loads(events[len(_DATA) : end])
    except JSONDecodeError:  # several lines, NaN, or not JSON
        return None
    return None if "error" in chunk else ChunkRun(chunk, events[end:])


def _find_several(events: bytes, end: int) -> ChunkRun | None:
    """Finds the events with the same bytes around their choice as the first, which ends at ``end``."""
    start = events.find(_CHOICES, 0, end) + len(_CHOICES)
    head, tail = events[:start], events[events.rfind(b"]", 0, end) : end]
    *choices, last = events[start:].split(tail + head)
    end = last.find(_END) + len(_END)
    if last.endswith(tail, 0, end):
        choices.append(last[: end - len(tail)])
        rest = last[end:]
    else:
        rest = head + last
    try:  # both texts are valid JSON only if the events were split at the right places
        found, chunk = loads(b"[%b]" % b",".join(choices)), loads(head[len(_DATA) :] + tail)
    except JSONDecodeError:
        return None
    if len(choices) < 2 or len(found) != len(choices) or chunk.get("choices") != [] or "error" in chunk:
        return None
    chunk["choices"] = found
    return ChunkRun(chunk, rest, (head, tail))
