"""The store ``http``, and the server that it talks to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentlightning.plugin.hookspecs import Component, Kind, hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def kinds() -> list[Kind]:
    return [Kind("pages", f"{__name__}.server.application:Pages", "pages that agl store serves too")]


@hookimpl
def components() -> Iterable[Component]:
    target = f"{__name__}.client:LightningStoreClient"
    return [
        Component("store", "http", target, summary="a store served by `agl store`"),
        Component("store", "https", target, summary="a store served by `agl store` behind TLS"),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    from agentlightning_plugins.stores.http.command import command

    cli.add_command(command)
