"""The strategy ``cs``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "strategy",
            "cs",
            "agentlightning_plugins.strategies.client_server.strategy:ClientServerExecutionStrategy",
            summary="runners are processes",
        ),
    ]
