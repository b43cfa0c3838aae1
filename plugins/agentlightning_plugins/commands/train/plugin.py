"""``agl train`` and ``agl config``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.commands.train.command import command, config_command

    cli.add_command(command)
    cli.add_command(config_command)
