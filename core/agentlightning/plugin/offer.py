"""Plugins that are loaded, and the components that they offer."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agentlightning.plugin.checks import OURS, TARGET, has_module, normalize, read_metadata
from agentlightning.plugin.hookspecs import Component, Kind


@dataclass
class Plugin:
    """The state of one plugin, which a distribution and the name of its entry point identify."""

    name: str
    owner: str
    """Name of the distribution that installed the plugin, as in ``slack@owner``; its own name if registered by hand."""
    origin: str
    """Name and version of the distribution, such as ``lightning 0.1.0``."""
    target: str
    distribution: importlib.metadata.Distribution | None = None
    state: Literal["loaded", "off", "refused", "broken"] = "loaded"
    error: str = ""
    interface: int | None = None
    """The number of the plugin interface that it was written for, if it states one."""
    is_used: bool = False
    """Whether one of its components was requested."""
    settings: Any = None
    """The argument ``settings`` of its hooks: an instance of the class ``Settings`` in its module; None without one."""
    kinds: list[Kind] = field(default_factory=list)
    offers: list[Component] = field(default_factory=list)

    @property
    def full_name(self) -> str:
        """Name that no other plugin has."""
        return self.name if self.owner == self.name else f"{self.name}@{self.owner}"

    @property
    def is_ours(self) -> bool:
        """Whether the plugin is built in: nothing that others install changes what its names mean."""
        return self.owner == OURS


class Offer(NamedTuple):
    """A component, and the plugin that offers it."""

    plugin: Plugin
    component: Component

    @property
    def full_name(self) -> str:
        """The name that selects this component even if other plugins offer one of the same name."""
        return f"{self.component.name}@{self.plugin.owner}"

    @property
    def problem(self) -> str:
        """The mistake in the description of the component, found without importing it; empty if there is none."""
        plugin, component = self
        if not TARGET.fullmatch(component.target):
            return f"a target {component.target!r}; write 'module:attribute'"
        if plugin.distribution is not None and component.extra is not None:
            extras = read_metadata(plugin.distribution).get_all("Provides-Extra") or ()
            if normalize(component.extra) not in map(normalize, extras):
                return f"an extra {component.extra!r}, which {plugin.origin} does not declare"
        module = component.target.partition(":")[0]
        return "" if has_module(module) else f"a target {component.target!r}, and there is no module {module!r}"
