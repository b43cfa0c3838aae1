"""JSON as bytes: parsing and writing."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

_MAX_DEPTH: Final = 500
_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def parse_json(text: bytes) -> Any:
    """Parses JSON, including NaN and infinities, which some model servers write; raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if _depth(text) > _MAX_DEPTH:
            raise ValueError("it is nested too deeply") from None
        return json.loads(text)


def _depth(text: bytes) -> int:
    """Returns how deep brackets are nested.

    ``json.loads`` would find that by reaching the interpreter's limit of recursion. If garbage is collected there, the
    callbacks of weak references fail, and what they keep account of leaks.
    """
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        if found[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in (b"]", b"}"):
            depth -= 1
    return deepest


def dump_json(value: Any) -> bytes:
    """Writes compact JSON. NaN becomes null; lone surrogates, which orjson refuses, are escaped."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()
