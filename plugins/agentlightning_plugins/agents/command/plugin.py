"""Commands as agents."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "agent",
            "command",
            "agentlightning_plugins.agents.command.agent:CommandAgent",
            summary="a command line in any language",
        ),
    ]
