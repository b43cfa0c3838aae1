"""``agl dashboard``: serves the dashboard of an existing store."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.http_request import SERVER_SETTINGS, RequestLog, is_loopback


@click.command("dashboard")
@click.argument("where", metavar="RUN_DIR|URL")
@click.option("--host", default="127.0.0.1", show_default=True, help="Any address but loopback needs a token.")
@click.option("--port", default=4748, show_default=True, type=click.IntRange(0, 65535), help="0 selects a free port.")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Token of the store, also for signing in.")
@click.option("--read-only", is_flag=True, help="Disable the actions: cancel, retry, label, promote.")
def command(where: str, host: str, port: int, token: str | None, read_only: bool) -> None:
    """Show the runs of a store in a browser; the store is in RUN_DIR or at URL."""
    if not token and not is_loopback(host):
        raise ConfigError(f"--host {host} lets other machines in; set --token or AGL_TOKEN, or listen on 127.0.0.1")
    asyncio.run(_serve(_open(where, token), host, port, token, read_only=read_only))


def _open(where: str, token: str | None) -> LightningStore:
    if "://" in where:
        return create_store(where, token=token if where.startswith("http") else None)
    path = Path(where)
    file = path / "store.db" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; give the directory of a run, an SQLite file, or the URL of a store")
    return create_store(f"sqlite:///{file}")


async def _serve(store: LightningStore, host: str, port: int, token: str | None, *, read_only: bool) -> None:
    from aiohttp import web

    from agentlightning_plugins.dashboard.dashboard import Dashboard

    dashboard = Dashboard(store, [token] if token else [], read_only=read_only)
    application = web.Application()
    application.add_routes(dashboard.routes())
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=RequestLog(),
        handler_cancellation=True,
        shutdown_timeout=3.0,
        **SERVER_SETTINGS,
    )
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    try:
        await runner.setup()
        try:
            listener = web.TCPSite(runner, host, port)
            await listener.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
            ) from error
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        shown = f"[{host}]" if ":" in host else host
        echo(f"Dashboard at http://{shown}:{runner.addresses[0][1]}/")
        await stop.wait()
    finally:
        await dashboard.stop()
        await runner.cleanup()
        await store.close()
