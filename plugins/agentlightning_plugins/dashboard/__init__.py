"""``agl dashboard``, and the pages that `agl store` serves."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.shared.lazy import lazy_commands


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_plugins.dashboard.dashboard:Dashboard"
    return [Component("pages", "dashboard", target, summary="shows a store in a browser")]


add_commands = lazy_commands("agentlightning_plugins.dashboard.command:command")
