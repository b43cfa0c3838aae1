from __future__ import annotations

import asyncio
import re
import signal

import click


@click.command("store")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; beyond loopback needs a token."
)
@click.option("--port", default=4747, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--backend", default="sqlite:///agl.db", show_default=True, metavar="URL", help="The store to serve.")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="What clients have to show.")
def command(host: str, port: int, backend: str, token: str | None) -> None:
    """Serve a store over HTTP.

    Algorithms, runners and gateways on any machine share the store that this command serves.
    """
    asyncio.run(_serve(host, port, backend, token))


async def _serve(host: str, port: int, backend: str, token: str | None) -> None:
    from agentlightning.store.factory import create_store
    from agentlightning_plugins.store_server import LightningStoreServer

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    store = create_store(backend)
    try:
        async with LightningStoreServer(store, host, port, token=token) as server:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            lifetime = "" if store.capabilities["durable"] else ", which keeps nothing when this process ends"
            shown = re.sub(r"(?<=//)[^/@]*@", "", backend)  # not the password
            click.echo(f"Serving {shown}{lifetime}, at {server.endpoint}")
            await stop.wait()
            for number in (signal.SIGINT, signal.SIGTERM):  # the second one does not wait for requests to finish
                loop.remove_signal_handler(number)
            click.echo("Stopping: requests in flight are finished, new ones refused.")
    finally:
        await store.close()
