"""What the integrations offer: each framework's objects become agents, and its spans arrive.

A framework is one line here and one module, which may import it at its top: the module is loaded only where the
framework is. The module defines ``wrap_agent``, ``instrument`` or both, as the hooks of those names.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from wrapt import register_post_import_hook  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.errors import PluginError
from agentlightning.hookspecs import Component, WrapOptions, hookimpl
from agentlightning.litagent import LitAgent

logger = logging.getLogger("agentlightning")

FRAMEWORKS: Final = {
    "agent_framework": "agent_framework",
    "agents": "openai_agents",
    "autogen_agentchat": "autogen",
    "crewai": "crewai",
    "langchain_core": "langchain",
    "openai": "openai",
}
"""The package of each framework, and our module for it."""


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_integrations.langchain_trace:handler_of"
    return [Component("handler", "langchain", target, extra="langchain", summary="LangChain's runs as spans")]


@hookimpl
def wrap_agent(agent: Any, options: WrapOptions) -> LitAgent[Any] | None:
    for package in dict.fromkeys(cls.__module__.partition(".")[0] for cls in type(agent).__mro__):
        if package in FRAMEWORKS:
            wrap: Callable[[Any, WrapOptions], LitAgent[Any] | None] | None
            try:
                wrap = getattr(_load(package), "wrap_agent", None)
            except ImportError as error:
                extra = FRAMEWORKS[package].replace("_", "-")
                raise PluginError(
                    f"{type(agent).__name__} needs more than what is installed: {error}. "
                    f"Install with: pip install 'lightning[{extra}]'"
                ) from error
            found: LitAgent[Any] | None = None if wrap is None else wrap(agent, options)
            if found is not None:
                return found
    return None


@hookimpl
def instrument(tracer_provider: Any) -> Callable[[], None] | None:
    switches = [_Switch(package, tracer_provider) for package in FRAMEWORKS]
    for switch in switches:
        register_post_import_hook(switch.turn_on, switch.package)

    def undo() -> None:
        for switch in reversed(switches):
            switch.turn_off()

    return undo


class _Switch:
    """One framework's spans: on once it is imported, before us or after."""

    def __init__(self, package: str, tracer_provider: Any) -> None:
        self.package = package
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
                begin: Callable[[Any], Callable[[], None] | None] | None
                begin = getattr(_load(self.package), "instrument", None)
                self._undo = None if begin is None else begin(self._tracer_provider)
            except Exception as error:  # isolation point: importing it must not fail because we cannot trace it
                logger.warning("%s is not traced: %s: %s", self.package, type(error).__name__, error, exc_info=error)

    def turn_off(self) -> None:
        """Undoes ``turn_on``, or forbids it."""
        with self._lock:
            self._is_over = True
            undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def _load(package: str) -> Any:
    return importlib.import_module(f"agentlightning_integrations.{FRAMEWORKS[package]}")
