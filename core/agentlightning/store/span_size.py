"""Estimates the memory that a span takes."""

from __future__ import annotations

from agentlightning.types import Span


def estimate_bytes(span: Span) -> int:
    """Roughly how much memory a span takes: exact enough for a bound, and much cheaper than serializing it."""
    size = 500
    for name, value in span.attributes.items():
        size += len(name) + (len(value) if type(value) is str else _estimate_value(value))
    for event in span.events:
        size += 200 + sum(len(name) + _estimate_value(value) for name, value in event.attributes.items())
    return size


def _estimate_value(value: object) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (int, float)):
            return 8 * len(value)
        return sum(8 + _estimate_value(item) for item in value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _estimate_value(item) for key, item in value.items())
    return 8
