"""``agl legacy``: serves a store to agents of Agent Lightning 0.1."""

from __future__ import annotations

import asyncio

import click

from agentlightning.cli import echo
from agentlightning_plugins.shared.log_setup import log_options
from agentlightning_plugins.shared.terminal import run_option


@click.command("legacy")
@click.option(
    "--store",
    default="http://127.0.0.1:4747",
    envvar="AGL_STORE",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="URL of the store, or directory of a run; the token of a store is read from AGL_TOKEN.",
)
@run_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; the protocol has no token.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@log_options
def command(store: str, run: str | None, host: str, port: int) -> None:
    """Serve the rollouts of a store to agents of Agent Lightning 0.1."""
    from agentlightning.store.factory import create_store
    from agentlightning.store.url import hide_password
    from agentlightning_plugins.legacy.v0 import AgentLightningServer
    from agentlightning_plugins.shared.web.server import raise_file_limit, stop_on_signals

    async def serve() -> None:
        raise_file_limit()
        server = AgentLightningServer(host, port, store=create_store(store, run=run))
        await server.start()
        stop = stop_on_signals()
        echo(f"Serving {hide_password(store)} to agents of 0.1 at {server.endpoint}")
        try:
            await stop.wait()
        finally:
            await server.stop()
            await server.store.close()

    asyncio.run(serve())
