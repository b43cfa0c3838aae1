"""JSON as bytes: parsing and writing."""

from __future__ import annotations

import json
from typing import Any

import orjson


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
