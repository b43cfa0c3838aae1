"""Immutable JSON: dicts and lists that refuse to change, so that stores can share records without copying them.

A frozen mapping is still a ``dict`` and a frozen sequence still a ``list``: ``==``, ``isinstance``, ``json`` and
``orjson`` treat them as such. ``thaw`` gives a plain, private copy to code that wants to modify it.
"""

from __future__ import annotations

from typing import Any, NoReturn


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


_SCALARS = (str, int, float, bool, type(None))


def freeze(value: Any) -> Any:
    """Returns an immutable copy of JSON-like data; already frozen data and other objects come back as they are."""
    kind = type(value)
    if kind in _SCALARS or kind is FrozenDict or kind is FrozenList:
        return value
    if isinstance(value, dict):
        return FrozenDict({key: item if type(item) in _SCALARS else freeze(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return FrozenList([item if type(item) in _SCALARS else freeze(item) for item in value])
    return value


def thaw(value: Any) -> Any:
    """Returns a plain, mutable deep copy of frozen data; other objects come back as they are."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value
