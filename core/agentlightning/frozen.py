"""Immutable JSON: dicts and lists that refuse to change, so that stores can share records without copying them.

A frozen mapping is still a ``dict`` and a frozen sequence still a ``list``: ``==``, ``isinstance``, ``json`` and
``orjson`` treat them as such. ``thaw`` gives a plain, private copy to code that wants to modify it.

What is frozen is JSON that every store keeps and gives back as it is: strings of valid Unicode, finite numbers,
integers of 64 bits, booleans, None, lists, and dicts with string keys, nested at most ``MAX_DEPTH`` deep. ``freeze``
refuses anything else where it is given; ``freeze_attributes`` is for what was observed and turns it into text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from agentlightning.errors import ConfigError

MAX_DEPTH: Final = 100
_SHOWN: Final = 4000
"""Characters kept of the text that stands for a value which is not JSON."""


def _refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError("records are immutable; take a copy with agentlightning.frozen.thaw(value) and change that")


class FrozenDict(dict[str, Any]):
    """A dict that raises TypeError on every change."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDict:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


class FrozenList(list[Any]):
    """A list that raises TypeError on every change."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __copy__(self) -> FrozenList:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenList:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)


class _NotJsonError(Exception):
    """Somewhere in a value is something that is not JSON; ``_complain`` finds it."""


_LEAST: Final = -(2**63)
_GREATEST: Final = 2**63 - 1
_SAFE: Final = frozenset({bool, type(None), FrozenDict, FrozenList})
"""The types of which every value is frozen JSON."""


def freeze(value: Any, name: str = "value") -> Any:
    """Returns an immutable copy of JSON data; what is frozen already comes back as it is.

    Tuples become lists, numbers of numpy and torch plain numbers. ``name`` is what the error calls the value.

    Raises:
        ConfigError: something in it is not JSON; the message says where and what to do.
    """
    try:
        return _freeze(value, 0)
    except _NotJsonError:
        raise ConfigError(_complain(value, name, 0)) from None


def freeze_attributes(attributes: Any) -> Any:
    """Freezes what was observed, such as the attributes of a span: it must not be lost because a part is not JSON.

    Such a part becomes text: ``"NaN"``, ``"Infinity"``, the digits of a larger integer, ISO dates, escapes for broken
    Unicode, or its ``repr``. Sets become lists, keys strings.
    """
    try:
        return _freeze(attributes, 0)
    except _NotJsonError:
        return _soften(attributes, 0)


def valid_text(text: str) -> str:
    """A string with lone surrogates, as broken file names and messages have them, replaced by their escapes."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def thaw(value: Any) -> Any:
    """Returns a plain, mutable deep copy of frozen data; other objects come back as they are."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value


def _freeze(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        if value.isascii() or _is_unicode(value):
            return value
    elif kind is int:
        if _LEAST <= value <= _GREATEST:
            return value
    elif kind is float:
        if math.isfinite(value):
            return value
    elif kind in _SAFE:
        return value
    elif depth > MAX_DEPTH:
        raise _NotJsonError
    elif isinstance(value, dict):
        depth += 1
        return FrozenDict(
            {
                key if type(key) is str and key.isascii() else _freeze_key(key): (
                    item if type(item) is str and item.isascii() else _freeze(item, depth)
                )
                for key, item in value.items()
            }
        )
    elif isinstance(value, (list, tuple)):
        return FrozenList(value if _is_plain(value) else [_freeze(item, depth + 1) for item in value])
    else:
        return _freeze(_simplify(value), depth)
    raise _NotJsonError


def _is_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether nothing in a list needs a closer look: token ids and log probabilities come by the thousand."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        if kind is int:
            return bool(min(values) >= _LEAST and max(values) <= _GREATEST)
        if kind is float:
            return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # the sum is the quick answer
        if kind is str:
            return all(map(str.isascii, values))
    return kinds <= _SAFE


def _freeze_key(key: object) -> str:
    if isinstance(key, str) and _is_unicode(key):
        return str.__str__(key)
    raise _NotJsonError


def _simplify(value: Any) -> Any:
    """The plain form of an object that is a string, a number or a mapping in all but its type."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    kind = type(value)  # an instance may do anything when it is asked what it has
    if hasattr(kind, "shape") and hasattr(kind, "item") and value.shape == ():  # a scalar of numpy or torch
        plain = value.item()
        if type(plain) in (bool, int, float, str):
            return plain
    if isinstance(value, Mapping):
        return dict(value)
    raise _NotJsonError


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _complain(value: Any, path: str, depth: int) -> str:
    """Says where the first thing is that is not JSON, and what to do about it. There is one."""
    if depth > MAX_DEPTH:
        return f"{path[:200]}... is nested more than {MAX_DEPTH} deep, or contains itself"
    if isinstance(value, Mapping):
        for key, item in value.items():
            try:
                _freeze_key(key)
            except _NotJsonError:
                return f"{path} has the key {key!r:.100}; the keys of a JSON object are strings of valid Unicode"
            if not _is_json(item, depth + 1):
                return _complain(item, f"{path}.{key}", depth + 1)
    if isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            if not _is_json(item, depth + 1):
                return _complain(item, f"{path}[{number}]", depth + 1)
    return (
        f"{path} = {_represent(value):.100} is not JSON, which is what stores keep and agents are sent; {_fix(value)}"
    )


def _is_json(value: Any, depth: int) -> bool:
    try:
        _freeze(value, depth)
    except _NotJsonError:
        return False
    return True


def _fix(value: Any) -> str:
    if isinstance(value, float):
        return "give None, or leave it out"
    if isinstance(value, int):
        return "integers have 64 bits: give it as a string"
    if isinstance(value, str):
        return "it has lone surrogates: encode it with errors='replace' and decode it again"
    if isinstance(value, (set, frozenset)):
        return "give sorted(value)"
    if isinstance(value, (bytes, bytearray)):
        return "give text, such as its base64"
    kind = type(value)
    if hasattr(kind, "tolist"):
        return "give value.tolist()"
    if hasattr(kind, "isoformat"):
        return "give value.isoformat()"
    if hasattr(kind, "model_dump"):
        return 'give value.model_dump(mode="json")'
    if hasattr(kind, "__dataclass_fields__"):
        return "give dataclasses.asdict(value)"
    return "give a dict, a list, text or a number that says the same, such as str(value)"


def _soften(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return _show(value)
    if isinstance(value, Mapping):
        return FrozenDict({valid_text(str(key)): _soften(item, depth + 1) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return FrozenList([_soften(item, depth + 1) for item in value])
    try:
        return _freeze(value, depth)
    except _NotJsonError:
        pass
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, (set, frozenset)):
        return FrozenList([_soften(item, depth + 1) for item in sorted(value, key=_show)])
    return _show(value)


def _show(value: Any) -> str:
    """Text that stands for an object."""
    try:
        return valid_text(str(value.isoformat()))
    except Exception:  # isolation point: not a date, or a foreign object that raises anything when it is asked
        return _represent(value)


def _represent(value: Any) -> str:
    """Text for any object, even one that cannot say what it is."""
    try:
        return valid_text(repr(value)[:_SHOWN])
    except Exception:  # isolation point: a foreign object may raise anything when it is asked for its text
        return object.__repr__(value)
