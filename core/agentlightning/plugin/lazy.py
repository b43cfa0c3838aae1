"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^from ([\w.]+) import \(?\s*(\w+) as \2\b", re.MULTILINE)


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Makes ``__all__``, ``__getattr__`` and ``__dir__`` of a package from its stub file, the only list of its names.

    Each line of the stub, in the folder of ``file``, is ``from module import Name as Name``. A name whose module
    belongs to a plugin is looked up among the installed components, so that the error for a missing extra contains the
    command that installs it.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {name: module for module, name in _IMPORT.findall(stub)}

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        if module == package:
            value: Any = importlib.import_module(f"{module}.{name}")
        elif module.partition(".")[0] == "agentlightning":
            value = getattr(importlib.import_module(module), name)
        else:
            from agentlightning.plugin.registry import get_manager

            value = get_manager().get_target(f"{module}:{name}")
        setattr(sys.modules[package], name, value)
        return value

    return sorted(modules), __getattr__, lambda: sorted({*vars(sys.modules[package]), *modules})
