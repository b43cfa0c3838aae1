"""Switches instrumentation of other libraries on and off."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeAlias

from wrapt import FunctionWrapper, register_post_import_hook  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import LightningError

logger = logging.getLogger("agentlightning")

Undo: TypeAlias = Callable[[], object]
Place: TypeAlias = tuple[Any, str]
"""A module or class and the name of one of its attributes."""


class OnImport:
    """Instruments a library once it is imported, now or later, until ``undo``.

    ``instrument`` is called once ``module`` has been imported; it returns a function that undoes it, or None.
    """

    def __init__(self, module: str, instrument: Callable[[], Undo | None]) -> None:
        self._module = module
        self._instrument = instrument
        self._lock = threading.RLock()
        self._undo: Undo | None = None
        self._is_over = False
        register_post_import_hook(self._on_import, module)

    def _on_import(self, module: Any) -> None:
        with self._lock:
            if self._is_over or self._undo is not None:
                return
            try:
                self._undo = self._instrument()
            except LightningError as error:
                logger.warning("%s is not traced: %s", self._module, error)
            except Exception as error:  # isolation point: a library that cannot be traced must still be importable
                logger.warning("%s is not traced: %s: %s", self._module, type(error).__name__, error, exc_info=error)

    def undo(self) -> None:
        with self._lock:
            self._is_over = True
            undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class Patches:
    """Attributes of modules and classes that are replaced until ``undo``."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner)[name], value))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any, Any, Any, Any], Any]) -> None:
        """Wraps a function; ``wrapper`` gets the function, its instance, ``args`` and ``kwargs``, as in ``wrapt``."""
        self.replace(owner, name, FunctionWrapper(vars(owner)[name], wrapper))

    def undo(self) -> None:
        """Restores every attribute, except those that other code has wrapped since."""
        while self._replaced:
            owner, name, original, value = self._replaced.pop()
            if vars(owner).get(name) is value:
                setattr(owner, name, original)


def instrument_and_restore(package: str, instrument: Callable[[], object], uninstrument: Undo) -> Undo:
    """Calls ``instrument``, for instrumentors whose ``uninstrument`` restores too little or too much.

    Returns a function that calls ``uninstrument``, then restores the attributes that are still replaced. Wrappers that
    other code has added since are kept.
    """
    before = dict(_functions(package))
    instrument()
    replaced: dict[Place, tuple[Any, Any]] = {}
    for place, value in _functions(package):
        original = before[place] if place in before else _unwrap(value)  # instrument() may import modules
        if original is not value:
            replaced[place] = original, value

    def undo() -> None:
        current = {(owner, name): vars(owner).get(name) for owner, name in replaced}
        uninstrument()
        for (owner, name), (original, value) in replaced.items():
            found = current[owner, name]
            setattr(owner, name, original if found is value else found)

    return undo


def _functions(package: str) -> Iterator[tuple[Place, Any]]:
    """Yields the functions of a package's imported modules, and all attributes of their classes."""
    modules: dict[str, Any] = {**sys.modules}  # a copy, because other threads may import modules
    for name, module in modules.items():
        if not f"{name}.".startswith(f"{package}."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, type) and value.__module__ == name:
                yield from (((value, method), function) for method, function in list(vars(value).items()))
            elif isinstance(value, (FunctionType, FunctionWrapper)):
                yield (module, attribute), value


def _unwrap(value: Any) -> Any:
    while isinstance(value, FunctionWrapper):
        value = value.__wrapped__
    return value
