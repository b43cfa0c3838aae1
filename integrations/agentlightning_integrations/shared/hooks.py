"""Plugin hooks of a framework: wrap its objects as agents, and instrument it once it is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from agentlightning.errors import PluginError
from agentlightning.litagent import LitAgent
from agentlightning.plugin.hookspecs import WrapOptions, hookimpl
from agentlightning_plugins.shared.instrumentation import OnImport


class Framework:
    """The hooks ``wrap_agent`` and ``instrument`` of one framework.

    ``module`` defines functions of the same names and signatures. It may import the framework at its top, because it is
    loaded only after the framework. ``extra`` installs what it imports. ``package`` is the framework's top-level name;
    if users may have a package of that name too, ``has`` is a name that only the framework's package defines.
    """

    def __init__(self, *, package: str, module: str, extra: str, has: str = "__name__") -> None:
        self.package, self.module, self.extra, self.has = package, module, extra, has

    @hookimpl
    def wrap_agent(self, agent: Any, options: WrapOptions) -> LitAgent[Any] | None:
        if all(cls.__module__.partition(".")[0] != self.package for cls in type(agent).__mro__):
            return None
        if not self._is_framework():
            return None
        try:
            module: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise PluginError(
                f"{type(agent).__name__} needs packages that are missing or too old: {error}. "
                f"Install with: pip install 'lightning[{self.extra}]'"
            ) from error
        wrapped: LitAgent[Any] | None = module.wrap_agent(agent, options)
        return wrapped

    @hookimpl
    def instrument(self, tracer_provider: Any) -> Callable[[], None]:
        def instrument() -> Callable[[], object] | None:
            return importlib.import_module(self.module).instrument(tracer_provider) if self._is_framework() else None

        return OnImport(self.package, instrument).undo

    def _is_framework(self) -> bool:
        """Whether the imported package is the framework, not another one of the same name."""
        return hasattr(sys.modules.get(self.package), self.has)
