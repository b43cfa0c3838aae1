"""The hooks of a framework's plugin: its objects become agents, and its spans are switched on when it is imported."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import PluginError
from agentlightning.plugin.hookspecs import WrapOptions, hookimpl

if TYPE_CHECKING:
    from agentlightning.litagent import LitAgent

logger = logging.getLogger("agentlightning")


class Framework:
    """The hooks ``wrap_agent`` and ``instrument`` of one framework.

    Its module may import the framework at its top: it is loaded only once the framework is. The module defines
    ``wrap_agent``, ``instrument`` or both, with the signatures of the hooks.
    """

    def __init__(self, *, package: str, module: str, extra: str) -> None:
        """Describes a framework.

        Args:
            package: the framework's top-level package.
            module: the integration's module, imported when an object of the framework arrives or it is instrumented.
            extra: the extra of ``lightning`` that installs what the module imports.
        """
        self.package, self.module, self.extra = package, module, extra

    @hookimpl
    def wrap_agent(self, agent: Any, options: WrapOptions) -> LitAgent[Any] | None:
        if all(cls.__module__.partition(".")[0] != self.package for cls in type(agent).__mro__):
            return None
        try:
            wrap = getattr(importlib.import_module(self.module), "wrap_agent", None)
        except ImportError as error:
            raise PluginError(
                f"{type(agent).__name__} needs more than what is installed: {error}. "
                f"Install with: pip install 'lightning[{self.extra}]'"
            ) from error
        found: LitAgent[Any] | None = None if wrap is None else wrap(agent, options)
        return found

    @hookimpl
    def instrument(self, tracer_provider: Any) -> Callable[[], None] | None:
        instrumentation = _Instrumentation(self, tracer_provider)
        register_post_import_hook(instrumentation.turn_on, self.package)
        return instrumentation.turn_off


class _Instrumentation:
    """The spans of one framework for one provider: on once it is imported, before us or after."""

    def __init__(self, framework: Framework, tracer_provider: Any) -> None:
        self._framework = framework
        self._tracer_provider = tracer_provider
        self._lock = threading.RLock()
        self._is_over = False
        self._undo: Callable[[], None] | None = None

    def turn_on(self, module: Any) -> None:
        """Called at the end of the framework's import."""
        with self._lock:
            if self._is_over or self._undo is not None:
                return
            try:
                begin = getattr(importlib.import_module(self._framework.module), "instrument", None)
                self._undo = None if begin is None else begin(self._tracer_provider)
            except Exception as error:  # isolation point: a framework that cannot be traced must still be importable
                package = self._framework.package
                logger.warning("%s is not traced: %s: %s", package, type(error).__name__, error, exc_info=error)

    def turn_off(self) -> None:
        """Undoes ``turn_on``, or forbids it."""
        with self._lock:
            self._is_over = True
            undo, self._undo = self._undo, None
        if undo is not None:
            undo()
