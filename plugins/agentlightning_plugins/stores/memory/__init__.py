"""The store ``memory``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.stores.memory.store:InMemoryLightningStore"
    return [Component("store", "memory", target, summary="in memory, for tests and runs of one process")]
