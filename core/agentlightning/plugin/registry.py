"""The plugin manager: loads plugins and hands out their components.

It replaces pluggy's ``load_setuptools_entrypoints`` because a failing plugin must not stop the host, a duplicate name
must not disappear, and a misspelt hook must not be ignored. A broken plugin is reported once and raises only when one
of its names is requested.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from agentlightning.errors import PluginError, PluginImportError, suggest
from agentlightning.plugin import hookspecs
from agentlightning.plugin.hookspecs import CORE_KINDS, Component, Kind
from agentlightning.plugin.settings import bind_settings

if TYPE_CHECKING:
    from packaging.requirements import Requirement

logger = logging.getLogger("agentlightning")
GROUP = "agentlightning"
_HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "agentlightning_spec")]


@dataclass
class Plugin:
    """The state of one plugin."""

    name: str
    origin: str
    """Name and version of the distribution that installed the plugin, such as ``lightning 0.1.0``."""
    target: str
    state: Literal["loaded", "broken"] = "loaded"
    error: str = ""
    kinds: list[Kind] = field(default_factory=list)
    offers: list[Component] = field(default_factory=list)
    distribution: importlib.metadata.Distribution | None = None


@functools.cache  # parses a file, which costs as much as loading several plugins
def _read_origin(distribution: importlib.metadata.Distribution | None) -> str:
    if distribution is None:
        return "unknown"
    metadata = distribution.metadata
    return f"{metadata['Name']} {metadata['Version']}"


@functools.cache
def _read_requirements(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(line) for line in distribution.requires or []]


@functools.cache  # `agl plugins` asks for the extra of every component
def _names_of_extra(distribution: importlib.metadata.Distribution, extra: str) -> list[str]:
    """Returns the distributions that an extra adds."""
    return [
        requirement.name
        for requirement in _read_requirements(distribution)
        if (marker := requirement.marker) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
    ]


class PluginManager:
    """The plugins of this process."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        """Loads plugins; by default those that installed distributions declare in the group ``agentlightning``."""
        self.plugins: dict[str, Plugin] = {}
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self.kinds = {kind.name: kind for kind in CORE_KINDS}
        """The kinds of components by name: core's and those that plugins declare."""
        self._offers: dict[tuple[str, str], list[tuple[Plugin, Component]]] = {}
        self._complete: set[tuple[str, str]] = set()
        """Components whose extras are installed, cached because reading distributions takes milliseconds."""
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=GROUP)
        for entry_point in sorted(entry_points, key=lambda point: point.name):
            self._load(entry_point)
        for plugin in self.plugins.values():  # after all have declared their kinds
            self._offer(plugin)

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls a hook on every loaded plugin: ``manager.hook.instrument(tracer_provider=...)``."""
        return self._pluggy.hook

    def register(self, module: ModuleType | object, name: str) -> Plugin:
        """Adds a plugin object, for tests and notebooks; raises PluginError for a wrong hook or a taken name."""
        plugin = Plugin(name, "registered by hand", getattr(module, "__name__", repr(module)))
        self._add(plugin, module)
        if unknown := self._describe_unused(plugin):
            self._pluggy.unregister(name=name)
            del self.plugins[name]
            raise PluginError(unknown)
        self._offer(plugin)
        return plugin

    def components(self, kind: str) -> dict[str, Component]:
        """Returns the components of a kind by name, in alphabetical order."""
        names = sorted(name for offered, name in self._offers if offered == kind)
        return {name: self._offers[kind, name][0][1] for name in names}

    def missing_requirements(self, kind: str, name: str) -> list[str]:
        """Returns the distributions of a component's extra that are not installed. Imports nothing of the component."""
        plugin, component = self._offers[kind, name][0]
        if component.extra is None or plugin.distribution is None:
            return []
        missing = []
        for required in _names_of_extra(plugin.distribution, component.extra):
            try:
                importlib.metadata.distribution(required)  # `version` would parse its metadata, which takes longer
            except importlib.metadata.PackageNotFoundError:
                missing.append(required)
        return missing

    def install_command(self, kind: str, name: str) -> str:
        """Returns the command that installs what a component needs."""
        plugin, component = self._offers[kind, name][0]
        distribution = plugin.distribution.name if plugin.distribution is not None else plugin.name
        return f"pip install '{distribution}[{component.extra}]'"

    def get(self, kind: str, name: str) -> Any:
        """Imports a component by its name, or a class by its path: ``module:Class`` or ``package.module.Class``.

        Raises:
            PluginError: no plugin offers it, several plugins offer different targets, or its plugin is broken.
            PluginImportError: its extra is not installed, or it cannot be imported.
        """
        if kind not in self.kinds:
            raise PluginError(self._describe_unknown_kind(kind))
        offers = self._offers.get((kind, name), [])
        if not offers and set(".:") & set(name) and name.replace(".", "_").replace(":", "_", 1).isidentifier():
            return _import_target(name if ":" in name else ":".join(name.rsplit(".", 1)), f"the {kind} {name!r}")
        if not offers:
            raise PluginError(self._describe_unknown(kind, name))
        if len({component.target for _, component in offers}) > 1:
            plugins = " and ".join(f"{plugin.name} ({plugin.origin})" for plugin, _ in offers)
            raise PluginError(f"the {kind} {name!r} is offered by {plugins}; uninstall one of them")
        self._require_extra(kind, name)
        plugin, component = offers[0]
        return _import_target(component.target, f"the {kind} {name!r} of plugin {plugin.name} ({plugin.origin})")

    def get_target(self, target: str) -> Any:
        """Imports ``"module:attribute"``; raises PluginImportError, which names the missing extra, if any."""
        try:
            return _import_target(target, f"the name {target.rpartition(':')[2]!r}")
        except PluginImportError:
            self.require(target)
            raise

    def require(self, *targets: str) -> None:
        """Raises PluginImportError if one of these targets is a component whose extra is not installed."""
        for (kind, name), offers in self._offers.items():
            if any(component.target in targets for _, component in offers):
                self._require_extra(kind, name)

    def _require_extra(self, kind: str, name: str) -> None:
        if (kind, name) in self._complete:
            return
        missing = self.missing_requirements(kind, name)
        if missing:
            command = self.install_command(kind, name)
            raise PluginImportError(f"the {kind} {name!r} needs {', '.join(missing)}. Install with: {command}")
        self._complete.add((kind, name))

    def create(self, kind: str, spec: str | type | Mapping[str, Any]) -> Any:
        """Makes a component from its name, the path of its class, the class, or ``{"name": any of these, **settings}``.

        A function that returns the component may take the place of the class. ``type``, the key of release 0.3, may
        replace ``name``. Raises PluginError like ``get``, and ConfigError for an unknown setting or a wrong type.
        """
        cls, settings = self.check(kind, spec)
        return cls(**settings)

    def check(self, kind: str, spec: str | type | Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the class and the checked settings of a component that is created later; raises like ``create``."""
        settings = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
        name = settings.pop("name" if "name" in settings else "type", None)
        if isinstance(name, type):
            return name, bind_settings(name, settings, f"{kind} {name.__name__!r}")
        if not isinstance(name, str):
            raise PluginError(f"a {kind} given as a mapping needs a 'name', got {spec!r}")
        cls = self.get(kind, name)
        return cls, bind_settings(cls, settings, f"{kind} {name!r}")

    def _describe_unknown(self, kind: str, name: str) -> str:
        installed = self.components(kind)
        broken = [f"{plugin.name} ({plugin.error})" for plugin in self.plugins.values() if plugin.error]
        message = f"no {kind} named {name!r}.{suggest(name, installed)} Installed: {', '.join(installed)}."
        return message + (f" Not loaded: {'; '.join(broken)}." if broken else "")

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> None:
        plugin = Plugin(
            entry_point.name, _read_origin(entry_point.dist), entry_point.value, distribution=entry_point.dist
        )
        if (other := self.plugins.get(plugin.name)) is not None:
            plugin.name = f"{entry_point.name} ({plugin.origin})"
            self._report(plugin, f"its name is taken by {other.target} of {other.origin}; rename its entry point")
            return
        try:
            self._add(plugin, entry_point.load())
        except (Exception, SystemExit) as error:  # isolation point: a broken plugin must not stop the host
            self._report(plugin, f"{type(error).__name__}: {error}")

    def _report(self, plugin: Plugin, error: str) -> None:
        plugin.state, plugin.error = "broken", error
        self.plugins[plugin.name] = plugin
        logger.warning("plugin %s of %s is not loaded: %s", plugin.name, plugin.origin, error)

    def _add(self, plugin: Plugin, module: object) -> None:
        if plugin.name in self.plugins:
            raise PluginError(f"a plugin named {plugin.name!r} is already loaded")
        _check_hooks(module)
        try:
            self._pluggy.register(module, plugin.name)
            plugin.kinds = _ask(module, "kinds")
            plugin.offers = _ask(module, "components")
        except (Exception, SystemExit):
            self._pluggy.unregister(name=plugin.name)  # pluggy keeps the hooks it had registered before the error
            raise
        for kind in plugin.kinds:
            self.kinds.setdefault(kind.name, kind)
        self.plugins[plugin.name] = plugin

    def _offer(self, plugin: Plugin) -> None:
        """Makes the components of a plugin available; reports components of a kind that no plugin uses."""
        if unknown := self._describe_unused(plugin):
            plugin.error = unknown
            logger.warning("plugin %s of %s: %s", plugin.name, plugin.origin, unknown)
        plugin.offers = [component for component in plugin.offers if component.kind in self.kinds]
        for component in plugin.offers:
            self._offers.setdefault((component.kind, component.name), []).append((plugin, component))

    def _describe_unused(self, plugin: Plugin) -> str:
        return "; ".join(
            f"component {component.name!r} has an {self._describe_unknown_kind(component.kind)}"
            for component in plugin.offers
            if component.kind not in self.kinds
        )

    def _describe_unknown_kind(self, kind: str) -> str:
        return f"unknown kind {kind!r}.{suggest(kind, self.kinds)} Kinds: {', '.join(sorted(self.kinds))}"


def _ask(module: object, hook: str) -> list[Any]:
    """Returns the answer of a module's implementation of ``kinds`` or ``components``."""
    implementation: Any = getattr(module, hook, None)
    return list(implementation()) if hasattr(implementation, "agentlightning_impl") else []


def _check_hooks(module: object) -> None:
    for name in dir(module):
        value = getattr(module, name)
        if not hasattr(value, "agentlightning_impl"):
            continue
        if name not in _HOOKS:
            raise PluginError(f"there is no hook {name!r}.{suggest(name, _HOOKS)} Hooks: {', '.join(_HOOKS)}")
        if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
            raise PluginError(f"hook {name!r} is async; hooks are plain functions")


def _import_target(target: str, what: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PluginImportError(f"{what} cannot be imported from {target!r}: {error}") from error


@functools.cache
def get_manager() -> PluginManager:
    """Returns the plugin manager of this process; the first call loads the plugins."""
    return PluginManager()
