"""Plugin hooks of a framework: wrap its objects as agents, and instrument it once it is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from agentlightning import semconv
from agentlightning.errors import PluginError, install_command
from agentlightning.litagent import LitAgent
from agentlightning.plugin.hookspecs import Component, WrapOptions, hookimpl
from agentlightning_plugins.shared.instrumentation import OnImport


class Framework:
    """The hooks of one framework, for the plugin package ``plugin``.

    Its module ``agent`` defines ``wrap_agent`` and ``instrument`` with the signatures of the hooks. It may import the
    framework at its top, because it is loaded only after the framework. ``extra`` installs what it imports. ``package``
    is the framework's top-level name; if users may have a package of that name too, ``has`` is a name that only the
    framework's package defines. ``agent_name`` is the attribute of the framework's own spans that names the agent, if
    not OpenTelemetry's; ``READER`` of the plugin must then be ``self.reader``, and it has the hook ``components``.
    """

    def __init__(self, plugin: str, *, package: str, extra: str, has: str = "__name__", agent_name: str = "") -> None:
        self.plugin, self.module, self.package, self.extra, self.has = plugin, f"{plugin}.agent", package, extra, has
        self.reader: semconv.SpanReader = {semconv.GEN_AI_AGENT_NAME: lambda span: span.attributes.get(agent_name)}

    @hookimpl
    def components(self) -> list[Component]:
        return [Component("span_reader", self.extra, f"{self.plugin}:READER", summary=f"agents of {self.package}")]

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
                f"Install with: {install_command(self.extra)}"
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
