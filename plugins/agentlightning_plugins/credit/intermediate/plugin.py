"""The credit rule ``intermediate``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "credit",
            "intermediate",
            "agentlightning_plugins.credit.intermediate.rule:IntermediateCredit",
            summary="tools, invalid outputs and retries count",
        ),
    ]
