"""Copies of framework objects, one for each rollout."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from agentlightning.errors import ConfigError

T = TypeVar("T")


def walk(root: Any, children: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yields the objects reachable from ``root``, breadth first, each once.

    Args:
        root: the first object.
        children: the objects to visit from one; containers are always searched.
    """
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
    """Deep-copies an object except for some of its parts.

    Args:
        value: the object.
        replacements: objects to use instead of parts, by the part's ``id``; a part that maps to itself is shared.
        name: of the object, for the error.

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
    """The models of one rollout, by the model that each replaces."""

    def __init__(self, redirect: Callable[[Any], Any]) -> None:
        """Creates the cache.

        Args:
            redirect: returns the model to call instead of another.
        """
        self._redirect = redirect
        self._found: dict[int, tuple[Any, Any]] = {}

    def get(self, model: Any) -> Any:
        _, found = self._found.get(id(model), (None, None))
        if found is None:
            found = self._redirect(model)
            self._found[id(model)] = model, found  # keeps both alive: ids are unique only among living objects
            self._found[id(found)] = found, found
        return found
