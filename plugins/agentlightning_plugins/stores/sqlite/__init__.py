"""The store ``sqlite``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.stores.sqlite.store:SqliteLightningStore"
    return [Component("store", "sqlite", target, summary="one durable file, shared by the processes of a machine")]
