"""Names that resolve when they are first used, so that importing the package loads nothing that is not asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

Target: TypeAlias = str | tuple[str, str]
"""``"module"`` that holds the name or is it, or ``(kind, name)`` of a plugin's component."""


def resolve_lazily(module: str, targets: Mapping[str, Target]) -> Callable[[str], Any]:
    """Makes a module's ``__getattr__`` that finds each name at its target, once."""

    def __getattr__(name: str) -> Any:
        target = targets.get(name)
        if target is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if isinstance(target, str):
            found = importlib.import_module(target)
            value = found if target == f"{module}.{name}" else getattr(found, name)
        else:
            from agentlightning.plugins import get_manager

            value = get_manager().get(cast(Any, target[0]), target[1])
        setattr(sys.modules[module], name, value)
        return value

    return __getattr__
