"""``agl dashboard``, which serves the dashboard of an existing store, and the pages that `agl store` serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.log_setup import log_options
from agentlightning_plugins.shared.terminal import StoreCommand, find_store, store_option

if TYPE_CHECKING:
    from agentlightning_plugins.shared.token import StoreTokens


@click.command("dashboard", cls=StoreCommand)
@click.argument("folder", required=False)
@store_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Any address but loopback needs a token.")
@click.option("--port", default=4748, show_default=True, type=click.IntRange(0, 65535), help="0 selects a free port.")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Token of the store, also for signing in.")
@click.option("--read-only", is_flag=True, help="Disable the actions: cancel, retry, label, promote.")
@log_options
def command(folder: str | None, where: str | None, host: str, port: int, token: str | None, read_only: bool) -> None:
    """Show runs in a browser: of the store in RUN_DIR or at URL, or of all runs in a FOLDER such as runs/."""
    from agentlightning_plugins.shared.token import StoreTokens
    from agentlightning_plugins.shared.web.request import is_loopback

    tokens = StoreTokens(token, None) if token else StoreTokens.of_environment()
    if folder is not None and where is not None:
        raise click.UsageError(f"{folder} and --store {where}: give one of them")
    if not tokens.current and not is_loopback(host):
        raise ConfigError(f"--host {host} lets other machines in; set --token or AGL_TOKEN, or listen on 127.0.0.1")
    asyncio.run(_serve(_open(folder or find_store(where), token), host, port, tokens, read_only=read_only))


def _open(where: str, token: str | None) -> LightningStore:
    from agentlightning.store.factory import create_store

    if "://" in where:
        return create_store(where, token=token if where.startswith("http") else None)
    path = Path(where)
    if path.is_dir() and not (path / "store.db").exists():
        from agentlightning_plugins.dashboard.folder import RunFolder

        return cast("LightningStore", RunFolder(path))  # has all methods that the dashboard calls without a run
    file = path / "store.db" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; give the directory of a run, an SQLite file, or the URL of a store")
    return create_store(where if path.is_dir() else f"sqlite:///{file}")


async def _serve(store: LightningStore, host: str, port: int, tokens: StoreTokens, *, read_only: bool) -> None:
    from aiohttp import web
    from aiohttp.typedefs import Handler

    from agentlightning_plugins.dashboard.dashboard import Dashboard
    from agentlightning_plugins.shared.web.request import client_url
    from agentlightning_plugins.shared.web.server import WebServer, raise_file_limit, stop_on_signals

    raise_file_limit()
    dashboard = Dashboard(store, tokens.current, read_only=read_only)

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if dashboard.admits(request):
            server.admit(request)
        return await handler(request)

    application = web.Application(middlewares=[admit])
    application.add_routes(dashboard.routes())
    server = WebServer(application, finish_s=3.0)
    try:
        bound = await server.start(host, port)
        stop = stop_on_signals()
        following = asyncio.create_task(tokens.follow(dashboard.replace_tokens))
        echo(f"Dashboard at {client_url(host, bound)}/")
        await stop.wait()
        following.cancel()
    finally:
        await dashboard.stop()
        await server.stop()
        await store.close()


@hookimpl
def components() -> Iterable[Component]:
    target = "agentlightning_plugins.dashboard.dashboard:Dashboard"
    return [Component("pages", "dashboard", target, summary="shows a store in a browser")]


add_commands = lazy_commands(f"{__name__}:command")
