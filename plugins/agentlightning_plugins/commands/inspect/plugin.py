"""``agl rollouts``, ``agl spans``, ``agl resources`` and ``agl workers``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.commands.inspect.resources import resources
    from agentlightning_plugins.commands.inspect.rollouts import rollouts
    from agentlightning_plugins.commands.inspect.spans import spans
    from agentlightning_plugins.commands.inspect.workers import workers

    cli.add_command(resources)
    cli.add_command(rollouts)
    cli.add_command(spans)
    cli.add_command(workers)
