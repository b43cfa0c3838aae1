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
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

import pluggy

from agentlightning.errors import PluginError, PluginImportError, install_command, suggest
from agentlightning.plugin import hookspecs
from agentlightning.plugin.checks import (
    OURS,
    ask,
    call_of,
    check_hooks,
    describe_wrong_type,
    find_unmet,
    import_target,
    normalize,
    read_metadata,
    requirements_of_extra,
)
from agentlightning.plugin.hookspecs import CORE_KINDS, INTERFACE, Component, Kind
from agentlightning.plugin.offer import Offer, Plugin
from agentlightning.plugin.settings import bind_settings, read_spec, settings_of

logger = logging.getLogger("agentlightning")
GROUP: Final = "agentlightning"
DISABLED: Final = "AGL_DISABLED_PLUGINS"
"""The environment variable that lists plugins to switch off: names of plugins or distributions, separated by commas."""
FILES: Final = "AGL_PLUGINS"
"""The environment variable with the paths of plugins that are not installed; the processes of a run inherit it."""
_MAX_ERROR: Final = 500


def _read_origin(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Returns the name of a distribution, and the name with the version."""
    metadata = read_metadata(distribution)
    return normalize(metadata["Name"]), f"{metadata['Name']} {metadata['Version']}"


class PluginManager:
    """The plugins of this process."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        """Loads plugins; by default those that installed distributions declare in the group ``agentlightning``."""
        self.plugins: dict[str, Plugin] = {}
        """The plugins by ``full_name``."""
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self.kinds = {kind.name: kind for kind in CORE_KINDS}
        """The kinds of components by name: core's and those that plugins declare."""
        self._offers: dict[tuple[str, str], list[Offer]] = {}
        self._complete: set[tuple[str, str]] = set()
        """Components whose extras are installed, cached because reading distributions takes milliseconds."""
        self._disabled = {name for name in re.split(r"[,\s]+", os.environ.get(DISABLED, "")) if name}
        points = importlib.metadata.entry_points(group=GROUP) if entry_points is None else entry_points
        found = [
            (*_read_origin(point.dist), point) if point.dist else (point.name, "unknown", point) for point in points
        ]
        for owner, origin, point in sorted(found, key=lambda each: (each[0] != OURS, each[0], each[2].name)):
            self._load(owner, origin, point)
        if entry_points is None:
            self._load_files(os.environ.get(FILES, "").split(os.pathsep))
        for plugin in self.plugins.values():  # after all have declared their kinds
            self._offer(plugin)
        known = {name for plugin in self.plugins.values() for name in _names_of(plugin)}
        for name in sorted(self._disabled - known):
            logger.warning("%s names %r, which is not installed.%s", DISABLED, name, suggest(name, known))

    @property
    def hook(self) -> pluggy.HookRelay:
        """Calls a hook on every loaded plugin: ``manager.hook.instrument(tracer_provider=...)``."""
        return self._pluggy.hook

    def register(self, module: ModuleType | object, name: str) -> Plugin:
        """Adds a plugin object, for tests and notebooks; raises PluginError for a wrong hook or a taken name."""
        plugin = Plugin(name, name, "registered by hand", getattr(module, "__name__", repr(module)))
        self._add(plugin, module)
        if problems := self._problems_of(plugin):
            self._pluggy.unregister(name=plugin.full_name)
            del self.plugins[plugin.full_name]
            raise PluginError(problems)
        self._offer(plugin)
        return plugin

    def used(self) -> dict[str, str]:
        """Returns the distributions, without ours, whose plugins this process uses, with their versions."""
        return {
            plugin.owner: plugin.distribution.version
            for plugin in self.plugins.values()
            if plugin.distribution is not None and not plugin.is_ours
            if plugin.is_used or set(self.hooks_of(plugin)) - {"components", "kinds"}
        }

    def disable(self, names: Iterable[str]) -> None:
        """Switches plugins off, here and in all processes that this one starts from now on.

        Raises:
            PluginError: a name is neither a plugin nor the distribution of one.
        """
        wanted = set(names)
        known = {name for plugin in self.plugins.values() for name in _names_of(plugin)}
        for name in sorted(wanted - known):
            raise PluginError(f"no plugin and no distribution of plugins is called {name!r}.{suggest(name, known)}")
        for plugin in self.plugins.values():
            if plugin.state == "loaded" and not wanted.isdisjoint(_names_of(plugin)):
                plugin.state, plugin.error = "off", "switched off by the configuration"
                self._pluggy.unregister(name=plugin.full_name)
                for offers in self._offers.values():
                    offers[:] = [offer for offer in offers if offer.plugin is not plugin]
        _add_to_environment(DISABLED, ",", wanted)

    def configure(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets what the hooks of plugins get as ``settings``, by the name of the plugin.

        Raises:
            PluginError: a plugin does not exist, or its module has no class ``Settings``.
            ConfigError: a setting is unknown or missing, or has a wrong type.
        """
        for name, values in settings.items():
            named = [plugin for plugin in self.plugins.values() if name in (plugin.name, plugin.full_name)]
            if len(named) != 1:
                known = [plugin.full_name for plugin in named or self.plugins.values()]
                problem = "is the name of several plugins" if named else "is not installed"
                raise PluginError(
                    f"settings of plugin {name!r}: it {problem}.{suggest(name, known)} {', '.join(known)}"
                )
            plugin = named[0]
            cls = getattr(self._pluggy.get_plugin(plugin.full_name), "Settings", None)
            if cls is None:
                raise PluginError(f"plugin {plugin.full_name} has no settings: its module defines no class Settings")
            plugin.settings = cls(**bind_settings(cls, values, f"plugin {plugin.full_name!r}"))

    def load_files(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Adds plugins that are not installed, here and in all processes that this one starts from now on.

        Args:
            paths: files such as ``mine.py``, or folders that are packages. Their names are the plugins' names, and what
                lies beside them can be imported.

        Raises:
            PluginError: a path does not exist, or its plugin is broken.
        """
        for plugin in self._load_files(map(str, paths)):
            if plugin.error:
                raise PluginError(f"plugin {plugin.target}: {plugin.error}")
            self._offer(plugin)
            if plugin.error:
                raise PluginError(f"plugin {plugin.target}: {plugin.error}")

    def _load_files(self, paths: Iterable[str]) -> list[Plugin]:
        loaded = []
        for path in [Path(path).absolute() for path in paths if path]:
            plugin = Plugin(path.stem, path.stem, str(path), str(path))
            if (known := self.plugins.get(plugin.full_name)) is not None and known.target == plugin.target:
                continue
            loaded.append(plugin)
            try:
                self._add(plugin, _import_file(path))
            except (Exception, SystemExit) as error:  # isolation point: a broken plugin must not stop the host
                self._report(plugin, "broken", f"{type(error).__name__}: {error}")
                continue
            _add_to_environment(FILES, os.pathsep, [str(path)])
        return loaded

    def components(self, kind: str) -> dict[str, Component]:
        """Returns the components of a kind by the name that selects each, in alphabetical order."""
        found: dict[str, Component] = {}
        for (offered, name), offers in self._offers.items():
            if offered == kind:
                meant = self._find(kind, name)
                if not meant:  # its plugin was switched off
                    continue
                is_clear = len({offer.component.target for offer in meant}) == 1
                found |= {name: meant[0].component} if is_clear else {}
                found |= {offer.full_name: offer.component for offer in offers if not is_clear or offer not in meant}
        return dict(sorted(found.items()))

    def offers_of(self, plugin: Plugin) -> list[tuple[str, Offer]]:
        """Returns the components of a plugin, each with the name that selects it."""
        found = []
        for offer in [Offer(plugin, component) for component in plugin.offers]:
            meant = {other.component.target for other in self._find(offer.component.kind, offer.component.name)}
            is_clear = meant == {offer.component.target}
            found.append((offer.component.name if is_clear else offer.full_name, offer))
        return found

    def hooks_of(self, plugin: Plugin) -> list[str]:
        """Returns the names of the hooks that a plugin implements."""
        module = self._pluggy.get_plugin(plugin.full_name)
        return sorted(caller.name for caller in self._pluggy.get_hookcallers(module) or ()) if module else []

    def missing_requirements(self, kind: str, name: str) -> list[str]:
        """Returns the requirements of a component's extra that are not met. Imports nothing of the component."""
        plugin, component = self._find(kind, name)[0]
        if component.extra is None or plugin.distribution is None:
            return []
        missing = []
        for requirement in requirements_of_extra(plugin.distribution, component.extra):
            try:
                installed = importlib.metadata.distribution(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(requirement.name)
                continue
            # Reading a version parses a file, which takes longer than finding it.
            if not plugin.is_ours and not requirement.specifier.contains(installed.version, prereleases=True):
                missing.append(f"{requirement.name}{requirement.specifier} ({installed.version} is installed)")
        return missing

    def install_command(self, kind: str, name: str) -> str:
        """Returns the command that installs what a component needs."""
        plugin, component = self._find(kind, name)[0]
        return install_command(str(component.extra), plugin.owner)

    def get(self, kind: str, name: str) -> Any:
        """Imports a component by its name, or a class by its path: ``module:Class`` or ``package.module.Class``.

        ``name@distribution`` selects the component of one distribution.

        Raises:
            PluginError: no plugin offers it, several plugins offer different targets, or its plugin is broken.
            PluginImportError: its extra is not installed, or it cannot be imported.
        """
        return self._get(kind, name)[0]

    def _get(self, kind: str, name: str) -> tuple[Any, str]:
        """Imports a component, or a class by its path; returns it with its description for messages."""
        if kind not in self.kinds:
            raise PluginError(self._describe_unknown_kind(kind))
        what = f"the {kind} {name!r}"
        offers = self._find(kind, name)
        if not offers and set(".:") & set(name) and name.replace(".", "_").replace(":", "_", 1).isidentifier():
            return import_target(name if ":" in name else ":".join(name.rsplit(".", 1)), what), what
        if not offers:
            raise PluginError(self._describe_unknown(kind, name))
        if len({offer.component.target for offer in offers}) > 1:
            plugins = " and ".join(f"{offer.plugin.full_name} ({offer.plugin.origin})" for offer in offers)
            names = " or ".join(dict.fromkeys(repr(offer.full_name) for offer in offers))
            raise PluginError(f"{what} is offered by {plugins}; write {names}")
        self._require_extra(kind, name)
        (plugin, component), *_ = offers
        plugin.is_used = True
        what += f" of plugin {plugin.full_name} ({plugin.origin})"
        if not plugin.is_ours and (problem := offers[0].problem):
            raise PluginImportError(f"{what} has {problem}")
        return import_target(component.target, what), what

    def _find(self, kind: str, name: str) -> list[Offer]:
        """Returns the components that a name means: the built-in one, else every plugin's component of this name."""
        plain, _, owner = name.partition("@")
        offers = self._offers.get((kind, plain), [])
        if owner:
            return [offer for offer in offers if normalize(offer.plugin.owner) == normalize(owner)]
        return [offer for offer in offers if offer.plugin.is_ours] or offers

    def get_target(self, target: str) -> Any:
        """Imports ``"module:attribute"``; raises PluginImportError, which names the missing extra, if any."""
        try:
            return import_target(target, f"the name {target.rpartition(':')[2]!r}")
        except PluginImportError:
            self.require(target)
            raise

    def require(self, *targets: str) -> None:
        """Raises PluginImportError if one of these targets is a component whose extra is not installed."""
        for plugin in self.plugins.values():
            for name, offer in self.offers_of(plugin):
                if offer.component.target in targets:
                    self._require_extra(offer.component.kind, name)

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

        A function that returns the component may take the place of the class. If the components of the kind are
        functions, a function is the component itself, and its other parameters are its settings. ``type``, the key of
        release 0.3, may replace ``name``.

        Raises:
            PluginError: as ``get``; or what was made is not what the kind expects.
            ConfigError: an unknown setting or a wrong type.
        """
        target, settings, what = self._check(kind, spec)
        expects = self.kinds[kind].expects
        call = call_of(expects)
        if call is not None and not inspect.isclass(target):
            return functools.partial(target, **settings) if settings else target
        made = target(**settings)
        if call is not None:
            if not callable(made):
                raise PluginError(f"{what} is not callable; a {kind} is called with {call}")
        elif wrong := describe_wrong_type(made, expects):
            raise PluginError(f"{what} is a {type(made).__name__} {wrong}")
        return made

    def check(self, kind: str, spec: str | type | Mapping[str, Any]) -> None:
        """Checks name and settings of a component that is created later; raises like ``create``."""
        self._check(kind, spec)

    def _check(self, kind: str, spec: str | type | Mapping[str, Any]) -> tuple[Any, dict[str, Any], str]:
        """Returns the target, its checked settings, and its description for messages."""
        settings = read_spec(spec)
        name = settings.pop("name" if "name" in settings else "type", None)
        if isinstance(name, type):
            return name, bind_settings(name, settings, f"{kind} {name.__name__!r}"), f"the {kind} {name.__name__!r}"
        if not isinstance(name, str):
            raise PluginError(f"a {kind} given as a mapping needs a 'name', got {spec!r}")
        target, what = self._get(kind, name)
        if not callable(target):
            raise PluginError(f"{what} is a {type(target).__name__}, not a class or a function")
        return target, bind_settings(target, settings, f"{kind} {name!r}", call_of(self.kinds[kind].expects)), what

    def _describe_unknown(self, kind: str, name: str) -> str:
        installed = self.components(kind)
        broken = [f"{plugin.full_name} ({plugin.error})" for plugin in self.plugins.values() if plugin.error]
        message = f"no {kind} named {name!r}.{suggest(name, installed)} Installed: {', '.join(installed)}."
        return message + (f" Not loaded: {'; '.join(broken)}." if broken else "")

    def _load(self, owner: str, origin: str, entry_point: importlib.metadata.EntryPoint) -> None:
        distribution = entry_point.dist
        plugin = Plugin(entry_point.name, owner, origin, entry_point.value, distribution)
        if plugin.full_name in self.plugins:
            other = self.plugins[plugin.full_name]
            plugin.name = f"{entry_point.name} ({plugin.target})"
            self._report(plugin, "broken", f"{other.origin} declares this name for {other.target} too; rename one")
        elif not self._disabled.isdisjoint(_names_of(plugin)):
            plugin.state, plugin.error = "off", f"switched off by {DISABLED}"
            self.plugins[plugin.full_name] = plugin
        elif distribution is not None and not plugin.is_ours and (unmet := find_unmet(distribution)):
            self._report(plugin, "refused", unmet)
        else:
            try:
                self._add(plugin, entry_point.load())
            except (Exception, SystemExit) as error:  # isolation point: a broken plugin must not stop the host
                self._report(plugin, "broken", f"{type(error).__name__}: {error}")

    def _report(self, plugin: Plugin, state: Literal["refused", "broken"], error: str) -> None:
        error = error if len(error) <= _MAX_ERROR else error[:_MAX_ERROR] + "..."
        plugin.state, plugin.error = state, error
        self.plugins[plugin.full_name] = plugin
        logger.warning("plugin %s of %s is not loaded: %s", plugin.name, plugin.origin, error)

    def _add(self, plugin: Plugin, module: object) -> None:
        if plugin.full_name in self.plugins:
            raise PluginError(f"a plugin named {plugin.full_name!r} is already loaded")
        plugin.interface = INTERFACE if plugin.is_ours else getattr(module, "plugin_interface", None)
        if plugin.interface is not None and plugin.interface > INTERFACE:
            raise PluginError(
                f"it was written for plugin interface {plugin.interface}, and this is {INTERFACE}; upgrade {OURS}"
            )
        check_hooks(module)
        try:
            self._pluggy.register(module, plugin.full_name)
            plugin.kinds = ask(module, "kinds", Kind)
            plugin.offers = ask(module, "components", Component)
        except (Exception, SystemExit):
            self._pluggy.unregister(name=plugin.full_name)  # pluggy keeps the hooks it had registered before the error
            raise
        settings = getattr(module, "Settings", None)
        if settings is not None and not any(each.default is each.empty for each in settings_of(settings).values()):
            plugin.settings = settings()
        for kind in plugin.kinds:
            self.kinds.setdefault(kind.name, kind)
        self.plugins[plugin.full_name] = plugin

    def _offer(self, plugin: Plugin) -> None:
        """Makes the components of a plugin available; reports those that cannot be used."""
        if not plugin.is_ours and (problems := self._problems_of(plugin)):  # a test checks ours
            plugin.error = problems
            logger.warning("plugin %s of %s: %s", plugin.name, plugin.origin, problems)
        plugin.offers = [component for component in plugin.offers if component.kind in self.kinds]
        for component in plugin.offers:
            self._offers.setdefault((component.kind, component.name), []).append(Offer(plugin, component))

    def _problems_of(self, plugin: Plugin) -> str:
        """Describes the kinds and components of a plugin that have no effect."""
        problems = [
            f"kind {kind.name!r} is declared already, as {self.kinds[kind.name].expects!r}"
            for kind in plugin.kinds
            if self.kinds[kind.name].expects != kind.expects
        ]
        for component in plugin.offers:
            known = component.kind in self.kinds
            problem = Offer(plugin, component).problem if known else f"an {self._describe_unknown_kind(component.kind)}"
            if problem:
                problems.append(f"component {component.name!r} has {problem}")
        return "; ".join(problems)

    def _describe_unknown_kind(self, kind: str) -> str:
        return f"unknown kind {kind!r}.{suggest(kind, self.kinds)} Kinds: {', '.join(sorted(self.kinds))}"


def _names_of(plugin: Plugin) -> set[str]:
    """Returns the names by which a plugin can be switched off."""
    return {plugin.name, plugin.full_name} if plugin.is_ours else {plugin.name, plugin.full_name, plugin.owner}


def _add_to_environment(variable: str, separator: str, values: Iterable[str]) -> None:
    """Adds values to a list in a variable, which processes that are started later inherit."""
    present = [value for value in os.environ.get(variable, "").split(separator) if value]
    os.environ[variable] = separator.join(dict.fromkeys([*present, *values]))


def _import_file(path: Path) -> ModuleType:
    """Imports a file or a package by its name, so that targets such as ``mine:Tracker`` refer to it."""
    source = path / "__init__.py" if path.is_dir() else path
    if not source.is_file():
        raise PluginError(f"there is no file {source}; give a file such as mine.py, or a folder that is a package")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    found = getattr(module, "__file__", None)
    if found is None or not source.samefile(found):
        raise PluginError(f"its name {path.stem!r} is taken by the module {found}; rename the file")
    return module


@functools.cache
def get_manager() -> PluginManager:
    """Returns the plugin manager of this process; the first call loads the plugins."""
    return PluginManager()
