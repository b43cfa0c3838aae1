"""``agl legacy``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.lazy import lazy_commands

add_commands = lazy_commands("agentlightning_plugins.legacy.command:command")


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "legacy", f"{__name__}.v0_messages:READER", summary="spans of 0.1 to 0.3")]
