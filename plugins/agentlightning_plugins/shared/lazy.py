"""Commands that are imported only when ``agl`` runs."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


def lazy_commands(*targets: str) -> Callable[[click.Group], None]:
    """Returns a plugin's hook ``add_commands``, which adds the commands given as ``module:attribute``."""

    @hookimpl
    def add_commands(cli: click.Group) -> None:
        for target in targets:
            cli.add_command(pkgutil.resolve_name(target))

    return add_commands
