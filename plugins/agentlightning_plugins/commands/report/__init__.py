"""``agl report``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.lazy import lazy_commands


@hookimpl
def components() -> Iterable[Component]:
    where = "agentlightning_plugins.commands.report"
    return [
        Component("report", "html", f"{where}.html:write_html", summary="report.html in the run's directory"),
        Component("report", "markdown", f"{where}.report:write_report", summary="report.md in the run's directory"),
    ]


add_commands = lazy_commands("agentlightning_plugins.commands.report.command:command")
