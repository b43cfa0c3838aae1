"""Immutable JSON: dicts and lists that refuse changes, so that stores can share records without copying them.

A frozen mapping is still a ``dict`` and a frozen sequence still a ``list``: ``==``, ``isinstance``, ``json`` and
``orjson`` treat them as such. ``thaw`` returns a plain copy that can be modified.

Frozen values are JSON that every store returns unchanged: strings of valid Unicode, finite numbers, 64-bit integers,
booleans, None, lists, and dicts with string keys, nested at most ``MAX_DEPTH`` deep. ``freeze`` refuses other values;
``freeze_attributes``, for recorded data, converts them to text.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, Self, TypeAlias

import orjson

from agentlightning.errors import ConfigError

MAX_DEPTH: Final = 100
_MAX_TEXT: Final = 4000  # characters kept of the ``repr`` of a value that is not JSON
_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**63 - 1


def _refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError("records are immutable; take a copy with agentlightning.frozen.thaw(value) and change that")


class _Frozen:
    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class FrozenDict(_Frozen, dict[str, Any]):
    """A dict that raises TypeError on every change."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


class FrozenList(_Frozen, list[Any]):
    """A list that raises TypeError on every change."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


class FrozenNumbers(FrozenList):
    """A list that has only numbers, such as token ids, so that readers need not check each item."""

    __slots__ = ()


_FROZEN_TYPES: Final = frozenset({bool, type(None), FrozenDict, FrozenList, FrozenNumbers})
"""All values of these types are frozen JSON."""

Repair: TypeAlias = Callable[[Any, int], Any]
"""Takes a value that is not JSON and its depth; returns a replacement or raises _NotJsonError."""


class _NotJsonError(Exception):
    """Holds the reason, and the value that is not JSON."""


def freeze(value: Any, name: str = "value", *, repair: Repair | None = None) -> Any:
    """Returns an immutable copy of JSON data; frozen data is returned unchanged.

    Tuples become lists, and scalars of numpy and torch become plain numbers. Raises ConfigError if a part is not JSON;
    the message has the path of the part, starting with ``name``, and says what to do.
    """
    try:
        return _freeze(value, 0, repair or _refuse_value)
    except _NotJsonError as error:
        reason, culprit = error.args
        place = _find(culprit, value, name, 0) or name
        raise ConfigError(f"{place if len(place) <= 200 else place[:200] + '...'}{reason}") from None


def freeze_row(row: Any, name: str) -> Any:
    """Freezes a row of a data set, as ``freeze`` does, and converts what files and tables contain.

    Dates and times become ISO text, durations seconds, decimals and UUIDs text, bytes are decoded as UTF-8, and arrays
    become lists. Raises ConfigError for other values.
    """
    return freeze(row, name, repair=_convert_cell)


def _convert_cell(value: Any, depth: int) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, uuid.UUID) or (isinstance(value, decimal.Decimal) and value.is_finite()):
        return str(value)
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    if depth <= MAX_DEPTH and getattr(type(value), "shape", None) is not None and hasattr(type(value), "tolist"):
        return _freeze(value.tolist(), depth, _convert_cell)
    _refuse_value(value, depth)


def freeze_attributes(attributes: Any) -> Any:
    """Freezes recorded data, such as the attributes of a span. A part that is not JSON becomes text.

    The text is ``"NaN"``, ``"Infinity"``, the digits of a larger integer, an ISO date, escapes for broken Unicode, or
    the ``repr`` of the value. Sets become lists, and keys become strings.
    """
    return _freeze(attributes, 0, _to_text)


def valid_text(text: str) -> str:
    """Replaces lone surrogates, which broken file names contain, with their escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


_CONTAINERS: Final = frozenset({dict, list})


def is_deep(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Whether lists and dicts of parsed JSON are nested more than ``max_depth`` deep; takes no recursion."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(max_depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def to_number(value: Any) -> float | None:
    """Returns the number that an agent gave as a reward: any real number, or an array or a tensor of one element.

    Returns None for anything else, also for text.
    """
    try:
        plain = value.item() if hasattr(type(value), "item") else value
        return None if isinstance(plain, (str, bytes, bytearray)) else float(plain)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def thaw(value: Any) -> Any:
    """Returns a plain, mutable deep copy of frozen data; other objects are returned unchanged."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value


def _freeze(value: Any, depth: int, repair: Repair) -> Any:
    kind = type(value)
    if kind is str:
        if value.isascii() or _is_unicode(value):
            return value
    elif kind is int:
        if _MIN_INT <= value <= _MAX_INT:
            return value
    elif kind is float:
        if math.isfinite(value):
            return value
    elif kind in _FROZEN_TYPES:
        return value
    elif depth > MAX_DEPTH:
        pass
    elif isinstance(value, (dict, Mapping)):
        return FrozenDict(
            {
                key if type(key) is str and key.isascii() else _freeze_key(key, value, repair): (
                    item if type(item) is str and item.isascii() else _freeze(item, depth + 1, repair)
                )
                for key, item in value.items()
            }
        )
    elif isinstance(value, (list, tuple)):
        return FrozenList(value if _is_flat(value) else [_freeze(item, depth + 1, repair) for item in value])
    elif (plain := _to_builtin(value)) is not value:
        try:
            return _freeze(plain, depth, _refuse_value)
        except _NotJsonError:
            return repair(value, depth)
    return repair(value, depth)


def _is_flat(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all items are known to be valid: a fast path, as token ids and log probabilities come by the thousand."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        if kind is int:
            return bool(min(values) >= _MIN_INT and max(values) <= _MAX_INT)
        if kind is float:
            return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # a finite sum is a quick proof
        if kind is str:
            return all(map(str.isascii, values))
    return kinds <= _FROZEN_TYPES


def _find(culprit: object, value: Any, place: str, depth: int) -> str | None:
    """Returns the place of an object in JSON data, such as ``metadata.tags[0]``."""
    if value is culprit:
        return place
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, (dict, Mapping)):
        items = ((f"{place}.{key}", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        items = ((f"{place}[{position}]", item) for position, item in enumerate(value))
    found = (_find(culprit, item, inner, depth + 1) for inner, item in items if depth <= MAX_DEPTH)
    return next(filter(None, found), None)


def _freeze_key(key: object, owner: object, repair: Repair) -> str:
    if isinstance(key, str) and _is_unicode(key):
        return str.__str__(key)
    if repair is not _to_text:
        raise _NotJsonError(f" has the key {key!r:.100}; the keys of a JSON object are strings of valid Unicode", owner)
    return valid_text(str(key))


def _to_builtin(value: Any) -> Any:
    """Converts an instance of a subclass of str, int or float, or a scalar of numpy or torch, to the plain type."""
    if isinstance(value, str):
        return str.__str__(value)
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    kind = type(value)  # not the instance: looking up its attributes may raise anything
    if hasattr(kind, "shape") and hasattr(kind, "item") and value.shape == ():
        plain = value.item()
        if type(plain) in (bool, int, float, str):
            return plain
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_value(value: Any, depth: int) -> NoReturn:
    if depth > MAX_DEPTH:
        raise _NotJsonError(f" is nested more than {MAX_DEPTH} deep, or contains itself", value)
    raise _NotJsonError(f" = {_represent(value):.100} is not JSON, which stores require; {_FIX}", value)


_FIX: Final = (
    "give text, numbers that are finite and fit in 64 bits, None, lists and dicts instead, such as value.tolist(), "
    "value.isoformat(), dataclasses.asdict(value) or str(value)"
)


def _to_text(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, (set, frozenset)) and depth <= MAX_DEPTH:
        return FrozenList([_freeze(item, depth + 1, _to_text) for item in sorted(value, key=_show)])
    return _show(value)


def _show(value: Any) -> str:
    try:
        return valid_text(str(value.isoformat()))
    except Exception:  # isolation point: not a date, or a foreign object that raises anything
        return _represent(value)


def _represent(value: Any) -> str:
    try:
        return valid_text(repr(value)[:_MAX_TEXT])
    except Exception:  # isolation point: the repr of a foreign object may raise anything
        return object.__repr__(value)


_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_MAX_PARSED_DEPTH: Final = 500


def parse_lenient(text: str | bytes, *, exact: bool = False) -> Any:
    """Parses JSON, also with NaN, infinities and lone surrogates; raises ValueError, also if it is nested too deeply.

    ``exact`` keeps integers of more than 64 bits, which otherwise become floats, and takes two to three times as long.

    ``json.loads`` would find the depth by reaching the interpreter's limit of recursion. If garbage is collected there,
    the callbacks of weak references fail, and what they keep account of leaks.
    """
    if not exact:
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(text)
    text = text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > _MAX_PARSED_DEPTH:
            raise ValueError("it is nested too deeply")
    return json.loads(text)
