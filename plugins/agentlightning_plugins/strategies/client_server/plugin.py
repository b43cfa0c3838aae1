"""The strategy ``cs``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_plugins.strategies.client_server.strategy:ClientServerExecutionStrategy"
    return [Component("strategy", "cs", target, summary="runners are processes")]
