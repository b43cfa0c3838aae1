"""Copies of framework objects for one rollout each: what has state is copied, what is shared or exchanged is named."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from agentlightning.errors import ConfigError

T = TypeVar("T")


def walk(root: Any, is_open: Callable[[Any], bool]) -> Iterator[Any]:
    """The objects that can be reached from one, each once, nearest first.

    Args:
        root: where to begin.
        is_open: whether to look at an object's attributes; containers are always looked into.
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
        elif isinstance(found, dict):
            waiting.extend(found.values())
        elif is_open(found):
            waiting.extend(getattr(found, "__dict__", {}).values())


def copy_except(value: T, exchanged: Mapping[int, Any], name: str) -> T:
    """Copies an object with all that it holds, but for some parts of it.

    Args:
        value: the object.
        exchanged: what takes the place of an object, by the object's ``id``; itself, if it is to be shared.
        name: of the object, for the error.

    Raises:
        ConfigError: something in it cannot be copied.
    """
    try:
        return copy.deepcopy(value, dict(exchanged))
    except TypeError as error:
        raise ConfigError(
            f"{name!r} cannot be copied, and each rollout needs one of its own: {error}. Make it in a function with "
            "@agl.rollout instead, anew for each task"
        ) from error
