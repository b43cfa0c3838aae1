"""The credit rules ``identical``, ``nearest`` and ``discounted``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "credit",
            "identical",
            "agentlightning_plugins.credit.standard.rule:IdenticalCredit",
            summary="the final reward for all calls",
        ),
        Component(
            "credit",
            "nearest",
            "agentlightning_plugins.credit.standard.rule:NearestCredit",
            summary="rewards of the nearest call",
        ),
        Component(
            "credit",
            "discounted",
            "agentlightning_plugins.credit.standard.rule:DiscountedCredit",
            summary="discounted return-to-go",
        ),
    ]
