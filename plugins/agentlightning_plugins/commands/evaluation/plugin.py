"""``agl eval`` and ``agl compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.commands.evaluation.compare_command import command as compare_command
    from agentlightning_plugins.commands.evaluation.eval_command import command as eval_command

    cli.add_command(eval_command)
    cli.add_command(compare_command)
