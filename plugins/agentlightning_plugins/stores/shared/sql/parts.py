"""Long attributes of spans in parts: what the calls of an attempt repeat, such as their history, is stored once."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, TypeAlias

import orjson

from agentlightning.errors import StoreError
from agentlightning.types import Span
from agentlightning_plugins.stores.shared.sql.changes import Stored

_SHORTEST: Final = 200
"""Characters of the shortest part."""
_INDEX: Final = re.compile(r"\.\d+(?=\.|$)")
_MAX_NEXT: Final = 8
_MAX_ATTEMPTS: Final = 256
_LONGEST: Final = 2**27
"""Characters of the longest JSON that is split: any longer one is stored whole."""
_MAX_BYTES: Final = 4 * _LONGEST


@dataclass(slots=True, eq=False)
class SharedPart:
    """A part of the JSON of an attribute, or of several attributes that make one list."""

    text: str
    """Emptied when it is written: the length and the hash are enough to find it."""
    length: int = 0
    position: int | None = None
    """None until it is written."""
    next: dict[tuple[int, int], SharedPart] = field(default_factory=dict)
    """The parts that followed it so far, by length and hash: several conversations may share a beginning."""

    def find(self, text: str, start: int, end: int) -> SharedPart | None:
        """Returns the longest part with which ``text[start:end]`` begins."""
        for length, known in sorted(self.next, reverse=True):
            if start + length <= end and hash(text[start : start + length]) == known:
                return self.next[length, known]
        return None

    def add(self, text: str) -> SharedPart:
        part = self.next[len(text), hash(text)] = SharedPart(text, len(text))
        if len(self.next) > _MAX_NEXT:
            del self.next[next(iter(self.next))]
        return part


Pieces: TypeAlias = list[str | SharedPart]


class SharedParts:
    """The parts that a writer has stored for the last attempts. A part that it does not know is stored again."""

    def __init__(self) -> None:
        self._attempts: dict[int | None, dict[str, SharedPart]] = {}

    def forget(self) -> None:
        """Forgets all parts: a transaction that stored some was not committed."""
        self._attempts.clear()

    def split(self, row: Stored) -> Pieces:
        """Returns the JSON of a new span in pieces, of which parts without position must be stored; empty if short."""
        span, text = row.record, row.text
        if not isinstance(span, Span) or not 2 * _SHORTEST <= len(text) <= _LONGEST:
            return []
        assert row.parent is not None
        assert isinstance(text, str)
        known = self._attempts[row.parent.position] = self._attempts.pop(row.parent.position, {})
        if len(self._attempts) > _MAX_ATTEMPTS:
            del self._attempts[next(iter(self._attempts))]
        pieces: Pieces = []
        done = 0
        for stem, names in groupby(span.attributes, _stem):
            content = orjson.dumps({name: span.attributes[name] for name in names}).decode()[1:-1]
            start = text.find(content[:_SHORTEST], done)
            if len(content) < _SHORTEST or start < 0 or not text.startswith(content, start):
                continue
            end = start + len(content) - (2 if content.endswith(']"') else 1)  # a longer list goes on before its end
            part, at, parts = known.setdefault(stem, SharedPart("")), start, list[SharedPart]()
            while (found := part.find(text, at, end)) is not None:
                part, at = found, at + found.length
                parts.append(part)
            if end - at >= _SHORTEST:
                parts.append(part.add(text[at:end]))
                at = end
            if parts:
                pieces += [text[done:start], *parts]
                done = at
        return [*pieces, text[done:]] if pieces else []


def _stem(name: str) -> str:
    """Returns the name of an attribute up to the index in it: some libraries write one attribute for each item."""
    return _INDEX.split(name, 1)[0]


def unwritten(pieces: Sequence[str | SharedPart]) -> list[SharedPart]:
    return [piece for piece in pieces if isinstance(piece, SharedPart) and piece.position is None]


def join(pieces: Sequence[str | SharedPart]) -> str:
    """Returns what the row of a span has in place of its JSON: a list of texts and positions of parts."""
    return orjson.dumps([piece if isinstance(piece, str) else piece.position for piece in pieces]).decode()


def deflate(text: str) -> bytes:
    return zlib.compress(text.encode(), 6)


def inflate(data: bytes) -> str:
    """Reads what ``deflate`` made.

    Raises:
        StoreError: it is too large, so it was not made by a store.
    """
    stream = zlib.decompressobj()
    text = stream.decompress(data, _MAX_BYTES)
    if stream.unconsumed_tail:
        raise StoreError(f"a record is larger than {_MAX_BYTES} bytes; the store is damaged")
    return text.decode()
