"""Conditions and sort orders of backend queries, applied to Python objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel

from agentlightning.records import Record
from agentlightning.store.backend import Condition

R = TypeVar("R", bound=Record)
T = TypeVar("T")
Reader: TypeAlias = Callable[[R], Any]


def read_field(field: str) -> Reader[Record]:
    """Returns a function that reads a field, or a key of a JSON field (``metadata.group``; None if it is absent)."""
    name, dot, key = field.partition(".")
    if not dot:
        return attrgetter(name)

    def read(record: Record) -> Any:
        mapping = getattr(record, name)
        return mapping.get(key) if isinstance(mapping, dict) else None

    return read


def make_test(condition: Condition, read: Reader[R]) -> Callable[[R], bool]:
    """Returns a function that tests whether a record satisfies a condition; values of another type do not."""
    value = condition.value
    match condition.op:
        case "eq":
            return lambda record: bool(read(record) == value)
        case "in":
            return lambda record: read(record) in value
        case "contains":
            return lambda record: isinstance(text := read(record), str) and value in text
        case "ge":
            return lambda record: _at_least(read(record), value)
        case "le":
            return lambda record: _at_least(value, read(record))


def choices(condition: Condition) -> Collection[Any]:
    """Returns the values that satisfy an ``eq`` or ``in`` condition."""
    return (condition.value,) if condition.op == "eq" else condition.value


def lookup_values(condition: Condition) -> Collection[Any] | None:
    """Returns the distinct values of an ``eq`` or ``in`` to look up in an index; None if that is not possible."""
    if condition.op not in ("eq", "in"):
        return None
    try:
        values = dict.fromkeys(choices(condition))
    except TypeError:  # a value is not hashable
        return None
    return None if None in values else values


def sort_by(items: list[T], read: Callable[[T], Any], descending: bool) -> None:
    """Sorts in place, stably: None, then numbers, then strings, then the rest by its JSON."""
    kinds = {type(read(item)) for item in items}
    if kinds <= {int, float} or kinds == {str}:
        items.sort(key=read, reverse=descending)
    else:
        items.sort(key=lambda item: _order(read(item)), reverse=descending)


def _at_least(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return False
    try:
        return bool(one >= other)
    except TypeError:  # such as a number and a string
        return False


_RANKS: Final[Mapping[type, int]] = {type(None): 0, bool: 1, int: 1, float: 1, str: 2}


def _order(value: Any) -> tuple[int, Any]:
    rank = _RANKS.get(type(value))
    if rank is not None:
        return rank, 0 if value is None else value
    if isinstance(value, BaseModel):
        return 3, value.model_dump_json()
    return 3, json.dumps(value, sort_keys=True, default=str)
