"""``agl legacy``: serves a store to agents of Agent Lightning 0.1."""

from __future__ import annotations

import click

from agentlightning.cli import echo
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.log_setup import log_options
from agentlightning_plugins.shared.terminal import StoreCommand, find_store, run_option, store_option, use_store


@click.command("legacy", cls=StoreCommand)
@store_option
@run_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; the protocol has no token.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@log_options
def command(where: str | None, run: str | None, host: str, port: int) -> None:
    """Serve the rollouts of a store, whose token is AGL_TOKEN, to agents of Agent Lightning 0.1."""
    from agentlightning.store.url import hide_password
    from agentlightning_plugins.legacy.v0 import AgentLightningServer
    from agentlightning_plugins.shared.web.server import raise_file_limit, stop_on_signals

    url = find_store(where)

    async def serve(store: LightningStore) -> None:
        raise_file_limit()
        server = AgentLightningServer(host, port, store=store)
        await server.start()
        stop = stop_on_signals()
        echo(f"Serving {hide_password(url)} to agents of 0.1 at {server.endpoint}")
        try:
            await stop.wait()
        finally:
            await server.stop()

    use_store(url, run, serve)
