"""Imports objects that are named in a configuration or on the command line."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError, suggest


def load_attribute(target: str) -> Any:
    """Imports ``module:attribute`` or ``path/to/file.py:attribute``; the working directory is on the import path.

    Raises:
        ConfigError: the form is invalid, the module cannot be imported, or the attribute does not exist.
    """
    name, separator, attribute = target.rpartition(":")
    if not separator or not name or not attribute:
        raise ConfigError(f"{target!r}: write module:attribute or path/to/file.py:attribute, as in my_agents:writer")
    folder = Path.cwd()
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise ConfigError(f"{target!r}: {file} does not exist; paths start at the working directory")
        folder, name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # isolation point: the user's module may raise anything
        raise ConfigError(f"{target!r}: importing {name} failed: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        known = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{target!r}: {name} has no {attribute}.{suggest(attribute, known)}") from error
