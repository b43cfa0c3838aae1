"""Switches on instrumentation that other people wrote, when its library is imported, before us or after."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from wrapt import (  # type: ignore[import-untyped] # wrapt has no types
    FunctionWrapper,
    register_post_import_hook,
)

logger = logging.getLogger("agentlightning")


class Library:
    """One library and its instrumentor."""

    def __init__(self, module: str, begin: Callable[[], Callable[[], object] | None]) -> None:
        """Waits for a module.

        Args:
            module: whose import switches the instrumentation on; never imported by us.
            begin: switches it on and returns what undoes it; None when it cannot.
        """
        self._module = module
        self._begin = begin
        self._lock = threading.RLock()
        self._undo: Callable[[], object] | None = None
        self._is_over = False
        register_post_import_hook(self._turn_on, module)

    def _turn_on(self, module: Any) -> None:
        """Called in the middle of somebody's import."""
        with self._lock:
            if self._is_over or self._undo is not None:
                return
            try:
                self._undo = self._begin()
            except Exception as error:  # isolation point: an import must not fail because we cannot trace it
                logger.warning("calls of %s are not traced: %s", self._module, error, exc_info=error)

    def turn_off(self) -> None:
        """Undoes what the import switched on."""
        with self._lock:
            self._is_over = True
            undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class Methods:
    """The functions and methods of a package as they were, for instrumentation that does not clean up after itself."""

    def __init__(self, package: str) -> None:
        """Remembers what is imported by now."""
        self._package = package
        self._before = dict(_functions(package))
        self._original: dict[tuple[Any, str], Any] = {}
        self._installed: dict[tuple[Any, str], Any] = {}

    def compare(self) -> None:
        """Finds what was wrapped since."""
        for place, value in _functions(self._package):
            original = self._before[place] if place in self._before else _unwrap(value)  # instrumentation imports some
            if original is not value:
                self._original[place], self._installed[place] = original, value

    def restore(self, undo: Callable[[], object]) -> None:
        """Calls ``undo``, and puts back what it left, except where somebody has wrapped it since."""
        now = {place: vars(place[0]).get(place[1]) for place in self._installed}
        undo()
        for (owner, name), installed in self._installed.items():
            if now[owner, name] is installed:
                setattr(owner, name, self._original[owner, name])
        self._installed = {}


def _functions(package: str) -> Iterator[tuple[tuple[Any, str], Any]]:
    modules: list[tuple[str, Any]] = list(sys.modules.items())  # a value can be None
    for name, module in modules:
        if module is not None and (name == package or name.startswith(f"{package}.")):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type):
                    if value.__module__ == name:
                        for method, function in list(vars(value).items()):
                            yield (value, method), function
                elif isinstance(value, (FunctionType, FunctionWrapper)):
                    yield (module, attribute), value


def _unwrap(value: Any) -> Any:
    while isinstance(value, FunctionWrapper):
        value = value.__wrapped__
    return value
