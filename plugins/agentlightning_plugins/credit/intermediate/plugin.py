"""The credit rule ``intermediate``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.credit.intermediate.rule:IntermediateCredit"
    return [Component("credit", "intermediate", target, summary="tools, invalid outputs and retries count")]
