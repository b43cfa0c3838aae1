"""The strategy ``shm``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_plugins.strategies.shared_memory.strategy:SharedMemoryExecutionStrategy"
    return [Component("strategy", "shm", target, summary="runners are threads")]
