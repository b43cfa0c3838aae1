"""Pickles objects of frameworks: cloudpickle, plus locks, TLS contexts, weak references and registered classes.

The bytes go only to our own child processes, through an inherited pipe.
"""

from __future__ import annotations

import importlib
import io
import pickle
import ssl
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import cloudpickle

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
    """Pickles a framework's object. The copy has new, unlocked locks and default TLS settings."""
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
        if cls is weakref.ReferenceType and (referent := obj()) is not None:
            return weakref.ref, (referent,)
        if cls is object and (place := _place_of_sentinel(obj)) is not None:
            return _get_sentinel, place
        for parent in cls.__mro__:
            if parent in _reducers:
                return _reducers[parent](obj)
        return super().reducer_override(obj)


def _place_of_sentinel(sentinel: object) -> tuple[str, str] | None:
    """Finds the module and name of a bare ``object()``, which frameworks compare by identity."""
    for module_name, module in list(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is sentinel:
                return module_name, name
    return None


def _get_sentinel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
