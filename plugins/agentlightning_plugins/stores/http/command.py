from __future__ import annotations

import asyncio
import resource
import signal

import click


@click.command("store")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; other than loopback needs a token."
)
@click.option("--port", default=4747, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--backend", default="sqlite:///agl.db", show_default=True, metavar="URL", help="The store to serve.")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Token that clients must send.")
@click.option("--keep-days", type=click.FloatRange(0, min_open=True), help="Delete rollouts that ended more days ago.")
@click.option("--keep-rollouts", type=click.IntRange(0), help="Delete the oldest ended rollouts above this number.")
def command(
    host: str, port: int, backend: str, token: str | None, keep_days: float | None, keep_rollouts: int | None
) -> None:
    """Serve a store over HTTP.

    Algorithms, runners and gateways on any machine share the store that this command serves.
    """
    from agentlightning_plugins.garbage_collection import relax_collector

    relax_collector()
    _raise_file_limit()
    asyncio.run(_serve(host, port, backend, token, keep_days, keep_rollouts))


def _raise_file_limit() -> None:
    """Allows as many open files, and so connections, as the system does without further rights."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    host: str, port: int, backend: str, token: str | None, keep_days: float | None, keep_rollouts: int | None
) -> None:
    from agentlightning.store.factory import create_store
    from agentlightning.store.retention import Retention
    from agentlightning.store.url import hide_password
    from agentlightning_plugins.stores.http.server import LightningStoreServer

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    retention = None
    if keep_days is not None or keep_rollouts is not None:
        retention = Retention(max_age_s=None if keep_days is None else keep_days * 86_400, max_rollouts=keep_rollouts)
    store = create_store(backend, retention=retention)
    try:
        async with LightningStoreServer(store, host, port, token=token) as server:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            lifetime = "" if store.capabilities["durable"] else " (not durable: lost when this process ends)"
            click.echo(f"Serving {hide_password(backend)}{lifetime} at {server.endpoint}")
            await stop.wait()
            for number in (signal.SIGINT, signal.SIGTERM):  # a second signal ends the process at once
                loop.remove_signal_handler(number)
            click.echo("Stopping: finishing requests in flight, refusing new ones.")
    finally:
        await store.close()
