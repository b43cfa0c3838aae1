"""Checks of plugins: their hooks, their requirements, the targets of their components, and what these make."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import PluginError, PluginImportError, suggest
from agentlightning.plugin import hookspecs

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURS: Final = "lightning"
"""The distribution of the built-in plugins."""
TARGET: Final = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")
_HOOKS: Final = [name for name, value in vars(hookspecs).items() if hasattr(value, "agentlightning_spec")]


def check_hooks(module: object) -> None:
    for name in dir(module):
        value = getattr(module, name)
        if not hasattr(value, "agentlightning_impl"):
            if name in _HOOKS and inspect.isfunction(value) and value.__module__ == getattr(module, "__name__", ""):
                raise PluginError(f"{name!r} is the name of a hook, and the function is not decorated with @hookimpl")
            continue
        if name not in _HOOKS:
            raise PluginError(f"there is no hook {name!r}.{suggest(name, _HOOKS)} Hooks: {', '.join(_HOOKS)}")
        if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
            raise PluginError(f"hook {name!r} is async; hooks are plain functions")
        for parameter in inspect.signature(value).parameters.values():
            if parameter.default is not parameter.empty:  # pluggy would never pass it
                raise PluginError(f"hook {name!r} has a default for {parameter.name!r}, so it would not get it")


def ask(module: object, hook: str, expected: type) -> list[Any]:
    """Returns the answer of a module's implementation of ``kinds`` or ``components``."""
    implementation: Any = getattr(module, hook, None)
    answer = list(implementation()) if hasattr(implementation, "agentlightning_impl") else []
    if wrong := [each for each in answer if not isinstance(each, expected)]:
        raise PluginError(f"hook {hook!r} returned {wrong[0]!r:.100}, which is no {expected.__name__}")
    return answer


def normalize(name: str) -> str:
    """Returns the name of a distribution as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache  # parsing the file costs as much as loading several plugins
def read_metadata(distribution: importlib.metadata.Distribution) -> importlib.metadata.PackageMetadata:
    return distribution.metadata


@functools.cache
def read_requirements(distribution: importlib.metadata.Distribution) -> list[Requirement]:
    from packaging.requirements import Requirement

    lines = read_metadata(distribution).get_all("Requires-Dist") or distribution.requires  # an old .egg-info
    return [Requirement(line) for line in lines or []]


@functools.cache  # `agl plugins` asks for the extra of every component
def requirements_of_extra(distribution: importlib.metadata.Distribution, extra: str) -> list[Requirement]:
    return [
        requirement
        for requirement in read_requirements(distribution)
        if (marker := requirement.marker) and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
    ]


@functools.cache
def _read_ours() -> tuple[str, set[str]]:
    """Returns the installed version of ours, and its extras."""
    metadata = importlib.metadata.distribution(OURS).metadata
    return metadata["Version"], set(map(normalize, metadata.get_all("Provides-Extra") or ()))


def find_unmet(distribution: importlib.metadata.Distribution) -> str:
    """Returns why a distribution does not fit this version of ours, as its metadata say; empty if it fits."""
    version, extras = _read_ours()
    for requirement in read_requirements(distribution):
        if normalize(requirement.name) != OURS or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            return f"it needs {OURS}{requirement.specifier}, and {version} is installed"
        if unknown := set(map(normalize, requirement.extras)) - extras:
            return f"it needs {OURS}[{', '.join(sorted(unknown))}], and {OURS} {version} has no such extra"
    return ""


def has_module(name: str) -> bool:
    """Whether a module is installed, without importing it or its packages; True if that cannot be seen in files."""
    if name in sys.modules:
        return True
    first, *others = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # a module without a spec, such as a namespace that was made by hand
        return True
    if spec is None or not others:
        return spec is not None
    folders = [Path(location) for location in spec.submodule_search_locations or ()]
    if folders and not any(folder.is_dir() for folder in folders):  # an archive
        return True
    *parents, last = others
    folders = [folder.joinpath(*parents) for folder in folders]
    return any((folder / last).is_dir() or any(folder.glob(f"{last}.*")) for folder in folders)


@functools.cache
def call_of(expects: str) -> inspect.Signature | None:
    """Returns the signature with which components of a kind are called; None if they are not functions."""
    if not expects.startswith("("):
        return None
    (function,) = ast.parse(f"def call{expects.partition(' ->')[0]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    positional = [inspect.Parameter(each.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in function.args.args]
    by_keyword = [inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY) for each in function.args.kwonlyargs]
    return inspect.Signature(positional + by_keyword)


def describe_wrong_type(made: object, expects: str) -> str:
    """Returns what an object lacks to be a component of a kind; empty if nothing is found."""
    if not TARGET.fullmatch(expects):
        return ""
    expected = import_target(expects, f"the class {expects!r}")
    if not getattr(expected, "_is_protocol", False):
        return "" if isinstance(made, expected) else f"and no {expected.__qualname__} ({expected.__module__})"
    names = {name for base in expected.__mro__[:-1] for name in vars(base) if not name.startswith("_")}
    missing = sorted(name for name in names if callable(getattr(expected, name, None)) and not hasattr(made, name))
    return f"without {', '.join(missing)}, which {expects} has" if missing else ""


def import_target(target: str, what: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PluginImportError(f"{what} cannot be imported from {target!r}: {error}") from error
