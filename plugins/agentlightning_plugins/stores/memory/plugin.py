"""The store ``memory``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "store",
            "memory",
            "agentlightning_plugins.stores.memory.store:InMemoryLightningStore",
            summary="in memory, for tests and runs of one process",
        ),
    ]
