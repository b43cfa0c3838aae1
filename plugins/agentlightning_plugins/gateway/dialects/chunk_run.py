"""Chunks of a stream that came together and differ in their only choice, as nearly all do.

What is around the choices is the same bytes in each, so a run of them is parsed as one chunk of many choices, and
written as it came around each. That spares a stream most of its JSON.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from orjson import JSONDecodeError, dumps, loads

from agentlightning_plugins.gateway.dialects.sse import to_event

_DATA: Final = b"data: "
_HEAD: Final = _DATA + b"{"
_CHOICES: Final = b'"choices":['
_END: Final = b"\n\n"


class ChunkRun(NamedTuple):
    """Events of OpenAI's streams: one, or several of one choice each."""

    chunk: dict[str, Any]
    """As one: the choices of all in order, and what is the same in all."""
    rest: bytes
    """The events behind them."""
    around: tuple[bytes, bytes] | None = None
    """What each of several has before its choice, and behind it; None for one."""

    def write(self, *, as_around: bool) -> bytes:
        """The events as the chunk is now.

        Args:
            as_around: whether it has changed in its choices only.
        """
        if self.around is None:
            return to_event(dumps(self.chunk))
        choices = self.chunk["choices"]
        if not as_around:
            return b"".join([to_event(dumps(self.chunk | {"choices": [choice]})) for choice in choices])
        head, tail = self.around
        return b"%b%b%b" % (head, (tail + head).join(map(dumps, choices)), tail)


def find_run(events: bytes, *, is_alone: bool) -> ChunkRun | None:
    """The chunks that begin whole events; None when the first of these is of another form.

    Args:
        events: server-sent events.
        is_alone: whether to take one: the first of a stream has more around its choices than the others.
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
    except JSONDecodeError:  # several lines, NaN, or no JSON
        return None
    return None if "error" in chunk else ChunkRun(chunk, events[end:])


def _find_several(events: bytes, end: int) -> ChunkRun | None:
    """Those that have what is around the choice of the first, which ends at ``end``."""
    start = events.find(_CHOICES, 0, end) + len(_CHOICES)
    head, tail = events[:start], events[events.rfind(b"]", 0, end) : end]
    *choices, last = events[start:].split(tail + head)
    end = last.find(_END) + len(_END)
    if last.endswith(tail, 0, end):
        choices.append(last[: end - len(tail)])
        rest = last[end:]
    else:
        rest = head + last
    try:  # that both are JSON shows that they were cut apart where they should be
        found, chunk = loads(b"[%b]" % b",".join(choices)), loads(head[len(_DATA) :] + tail)
    except JSONDecodeError:
        return None
    if len(choices) < 2 or len(found) != len(choices) or chunk.get("choices") != [] or "error" in chunk:
        return None
    chunk["choices"] = found
    return ChunkRun(chunk, rest, (head, tail))
