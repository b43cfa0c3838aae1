"""JSON as bytes: parsing, writing, and edits that keep the other bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

_ABSENT: Final = object()


def parse_json(text: bytes) -> Any:
    """Parses JSON, including NaN and infinities, which some model servers write; raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def dump_json(value: Any) -> bytes:
    """Writes compact JSON. NaN becomes null; lone surrogates, which orjson refuses, are escaped."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def set_fields(text: bytes, parsed: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """Sets top-level fields of the JSON object ``text``, whose parsed form is ``parsed``.

    New fields are inserted at the front and all other bytes stay; replacing a value rewrites the whole object.
    """
    changes = {key: value for key, value in fields.items() if parsed.get(key, _ABSENT) != value}
    if not changes:
        return text
    if not changes.keys().isdisjoint(parsed):
        return dump_json({**parsed, **changes})
    start = text.index(b"{") + 1
    return b"%b%b%b%b" % (text[:start], dump_json(changes)[1:-1], b"," if parsed else b"", text[start:])
