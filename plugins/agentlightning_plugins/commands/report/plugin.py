"""``agl report``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_plugins.commands.report.report:write_report"
    return [Component("report", "markdown", target, summary="report.md in the run's directory, when the run ends")]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.commands.report.command import command

    cli.add_command(command)
