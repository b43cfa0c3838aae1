"""Copies of framework objects, one for each rollout."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from agentlightning.errors import ConfigError

T = TypeVar("T")


def walk(root: Any, children: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yields the objects reachable from ``root`` by ``children`` and through containers, breadth first, each once."""
    seen: set[int] = set()
    waiting: deque[Any] = deque([root])
    while waiting:
        found = waiting.popleft()
        if id(found) in seen or isinstance(found, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, (list, tuple, set, frozenset, deque)):
            waiting.extend(found)
        else:
            waiting.extend(found.values() if isinstance(found, dict) else children(found))


def copy_except(value: T, replacements: Mapping[int, Any], name: str) -> T:
    """Deep-copies an object, with ``replacements`` for parts by their ``id``; a part that maps to itself is shared.

    Raises:
        ConfigError: a part cannot be copied.
    """
    try:
        return copy.deepcopy(value, dict(replacements))
    except TypeError as error:
        raise ConfigError(
            f"{name!r} cannot be copied, and each rollout needs its own copy: {error}. Create it inside a function "
            "decorated with @agl.rollout instead"
        ) from error


class ModelCache:
    """The models of one rollout; ``redirect`` creates each from the model that it replaces."""

    def __init__(self, redirect: Callable[[Any], Any]) -> None:
        self._redirect = redirect
        self._found: dict[int, tuple[Any, Any]] = {}

    def get(self, model: Any) -> Any:
        _, found = self._found.get(id(model), (None, None))
        if found is None:
            found = self._redirect(model)
            self._found[id(model)] = model, found  # keeps both alive: ids are unique only among living objects
            self._found[id(found)] = found, found
        return found
