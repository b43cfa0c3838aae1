"""Commands as agents."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.agents.command.agent:CommandAgent"
    return [Component("agent", "command", target, summary="a command line in any language")]
