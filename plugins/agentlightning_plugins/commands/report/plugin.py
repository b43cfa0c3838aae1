"""``agl report``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.commands.lazy import lazy_commands


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_plugins.commands.report.report:write_report"
    return [Component("report", "markdown", target, summary="report.md in the run's directory, when the run ends")]


add_commands = lazy_commands("agentlightning_plugins.commands.report.command:command")
