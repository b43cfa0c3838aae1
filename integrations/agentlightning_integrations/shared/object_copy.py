"""Copies of framework objects: one for each rollout, and pickled ones for runner processes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
import ssl
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType
from typing import Any, Final, TypeAlias, TypeVar

import cloudpickle

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

    Locks and the like are made again, as by ``dump``.

    Raises:
        ConfigError: a part cannot be copied.
    """
    with contextlib.suppress(TypeError):  # of a lock
        return copy.deepcopy(value, dict(replacements))
    try:
        buffer = io.BytesIO()
        pickler = _SharingPickler(buffer, replacements)
        pickler.dump(value)
        copied: T = _SharingUnpickler(buffer, pickler.shared).load()
        return copied
    except (TypeError, pickle.PicklingError) as error:
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


Reducer: TypeAlias = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Returns a function and its arguments that make the object again."""

_LOCK: Final = type(threading.Lock())
_RLOCK: Final = type(threading.RLock())
_reducers: dict[type, Reducer] = {}


def register_reducer(cls: type, reduce: Reducer) -> None:
    """Registers how objects of a class and its subclasses are pickled with a framework's object.

    Args:
        cls: a class whose objects cannot be pickled, such as a client with open connections.
        reduce: returns the function and the arguments that make such an object again in the other process.
    """
    _reducers[cls] = reduce


def dump(value: Any) -> bytes:
    """Pickles a framework's object. The copy has new, unlocked locks, idle thread pools and default TLS settings."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Undoes ``dump``."""
    return pickle.loads(data)  # noqa: S301 # written by our own parent into an inherited pipe


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle ships no types
    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls is _LOCK:
            return threading.Lock, ()
        if cls is _RLOCK:
            return threading.RLock, ()
        if cls is ssl.SSLContext:
            return ssl.create_default_context, ()
        if cls is ThreadPoolExecutor:
            return ThreadPoolExecutor, (obj._max_workers,)
        if cls is weakref.ReferenceType and (referent := obj()) is not None:
            return weakref.ref, (referent,)
        if cls is object and (place := _place_of_sentinel(obj)) is not None:
            return _get_sentinel, place
        for parent in cls.__mro__:
            if parent in _reducers:
                return _reducers[parent](obj)
        return super().reducer_override(obj)


class _SharingPickler(_Pickler):
    """Pickles an object for this process: functions, classes, modules and replacements stay outside the pickle."""

    def __init__(self, file: io.BytesIO, replacements: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._replacements = replacements
        self.shared: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if id(obj) not in self._replacements and not isinstance(obj, (FunctionType, ModuleType, type)):
            return None
        self.shared[id(obj)] = self._replacements.get(id(obj), obj)
        return id(obj)


class _SharingUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, shared: Mapping[int, Any]) -> None:
        buffer.seek(0)
        super().__init__(buffer)
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]


def _place_of_sentinel(sentinel: object) -> tuple[str, str] | None:
    """Finds the module and name of a bare ``object()``, which frameworks compare by identity."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is sentinel:
                return module_name, name
    return None


def _get_sentinel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
