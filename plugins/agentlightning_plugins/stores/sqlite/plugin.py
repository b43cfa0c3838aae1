"""The store ``sqlite``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "store",
            "sqlite",
            "agentlightning_plugins.stores.sqlite.store:SqliteLightningStore",
            summary="one durable file, shared by the processes of a machine",
        ),
    ]
