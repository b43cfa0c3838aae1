"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_IMPORT = re.compile(r"^from ([\w.]+) import \(?\s*(\w+) as \2\b", re.MULTILINE)


_OLD_NAMES: Final = (
    "; if it is a name of Agent Lightning 0.3, write `import agentlightning.compat` first, which "
    "restores most of them; docs/migration.md explains the rest"
)


class _OldNameFinder:
    """The last finder of modules: explains what to do about a module or name of 0.3 that no longer exists."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for an unknown module of ours; ``from agentlightning import name`` asks too.

        The error has no ``name``: Python would take a named one for a missing submodule, and replace it. Only an
        import raises: ``importlib.util.find_spec``, which asks the same finders, returns None for an unknown module.
        """
        is_import = sys._getframe(2).f_code.co_name != "find_spec"  # the caller of the frame that asks each finder
        if is_import and name.startswith("agentlightning."):
            raise ModuleNotFoundError(f"there is no {name}{_OLD_NAMES}")


sys.meta_path.append(_OldNameFinder)


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
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_OLD_NAMES}")
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
