"""Imports objects that are named in a configuration or on the command line."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from agentlightning.errors import ConfigError, suggest


def load_attribute(target: str) -> Any:
    """Imports ``module:attribute`` or ``path/to/file.py:attribute``.

    The folder of the file, or the working directory, is appended to the import path: a file there never replaces an
    installed package that other code imports.

    Raises:
        ConfigError: the form is invalid, the module cannot be imported, or the attribute does not exist.
    """
    name, separator, attribute = target.rpartition(":")
    if not separator or not name or not attribute:
        raise ConfigError(f"{target!r}: write module:attribute or path/to/file.py:attribute, as in my_agents:writer")
    file = Path(name if name.endswith(".py") else f"{name}.py").resolve()
    if name.endswith(".py"):
        if not file.is_file():
            raise ConfigError(f"{target!r}: {file} does not exist; paths start at the working directory")
        name = file.stem
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        module = _import_file(name, file) if file.is_file() else importlib.import_module(name)
    except Exception as error:  # isolation point: the user's module may raise anything
        raise ConfigError(f"{target!r}: importing {name} failed: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        known = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{target!r}: {name} has no {attribute}.{suggest(attribute, known)}") from error


def _import_file(name: str, file: Path) -> ModuleType:
    """Imports the module of a file, under a different name if an installed module is called ``name``."""
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # the module of this name has no spec, like __main__
        return importlib.import_module(name)
    if found is None or (found.origin is not None and Path(found.origin).resolve() == file):
        return importlib.import_module(name)
    own_name = f"{name}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if own_name in sys.modules:
        return sys.modules[own_name]
    spec = importlib.util.spec_from_file_location(own_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[own_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own_name]
        raise
    cloudpickle.register_pickle_by_value(module)  # runner processes cannot import it by this name
    return module
