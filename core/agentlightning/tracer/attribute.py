"""Converts Python values to attributes of spans."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from agentlightning.errors import format_error

_SCALARS = (str, bool, int, float)


def flatten(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flat attributes: nested mappings, and lists that do not only hold scalars, get dotted names.

    None is omitted, scalars of numpy and torch become Python's, bytes become base64, and other values that are not
    JSON become their ``repr``.
    """
    return dict(_flatten("", attributes))


def to_json(value: Any) -> str:
    """Returns a value as JSON, in which bytes become base64, and other values that are not JSON their ``repr``."""
    try:
        return json.dumps(value, default=_simplify, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, or a cycle
        return json.dumps(repr(value), ensure_ascii=False)


def exception_attributes(error: BaseException) -> dict[str, str]:
    """Returns OpenTelemetry's attributes of an exception."""
    return {
        "exception.type": type(error).__qualname__,
        "exception.message": str(error),
        "exception.stacktrace": format_error(error),
    }


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _SCALARS):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, (list, tuple)):
        if all(isinstance(item, _SCALARS) for item in value):
            yield prefix, list(value)
        else:
            for i, item in enumerate(value):
                yield from _flatten(f"{prefix}.{i}", item)
    elif value is not None:
        simple = _simplify(value)
        yield from _flatten(prefix, repr(value) if type(simple) is type(value) else simple)


def _simplify(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
        return value.item()
    return repr(value)
