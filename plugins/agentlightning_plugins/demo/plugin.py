"""``agl demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.demo.command import command

    cli.add_command(command)
