"""The strategy ``shm``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "strategy",
            "shm",
            "agentlightning_plugins.strategies.shared_memory.strategy:SharedMemoryExecutionStrategy",
            summary="runners are threads",
        ),
    ]
