"""The credit rules ``identical``, ``nearest`` and ``discounted``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    module = "agentlightning_plugins.credit.standard.rule"
    return [
        Component("credit", "identical", f"{module}:IdenticalCredit", summary="the final reward for all calls"),
        Component("credit", "nearest", f"{module}:NearestCredit", summary="rewards of the nearest call"),
        Component("credit", "discounted", f"{module}:DiscountedCredit", summary="discounted return-to-go"),
    ]
