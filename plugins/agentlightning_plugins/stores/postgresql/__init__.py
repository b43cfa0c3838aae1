"""The store ``postgresql``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    target = f"{__name__}.store:PostgresLightningStore"
    return [
        Component("store", "postgresql", target, "postgresql", "one database for the processes of many machines"),
        Component("store", "postgres", target, "postgresql", "another name for postgresql"),
    ]
