"""The store ``postgresql``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "store",
            "postgresql",
            "agentlightning_plugins.stores.postgresql.store:PostgresLightningStore",
            extra="postgresql",
            summary="one database for the processes of many machines",
        ),
        Component(
            "store",
            "postgres",
            "agentlightning_plugins.stores.postgresql.store:PostgresLightningStore",
            extra="postgresql",
            summary="another name for postgresql",
        ),
    ]
