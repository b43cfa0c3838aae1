from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.shared.log_setup import log_options

if TYPE_CHECKING:
    from agentlightning.store.protocol import LightningStore
    from agentlightning_plugins.shared.token import StoreTokens

_CLOSE_S: Final = 3.0
"""How long the database may take to finish accepted writes once the requests in flight have ended."""
_SHOWN_BYTES: Final = 100_000_000  # the progress of compacting that is worth a line
_LINES: Final = {
    "run_started": "run {name} started",
    "run_finished": "the run ended: {status}",
    "rollout_enqueued": "{rollout_id} queued",
    "rollout_started": "{rollout_id} claimed by {worker_id}",
    "resources_published": "resources {resources_id} published, version {version}",
    "step_finished": "step {step} done",
}
"""The lines about events by their kind; the end of an attempt also says how its rollout ended."""

logger = logging.getLogger("agentlightning")


_option = functools.partial(click.option, show_envvar=True, show_default=True)


@click.group("store", invoke_without_command=True)
@_option("--host", default="127.0.0.1", envvar="AGL_HOST", help="Address to listen on; any but loopback needs a token.")
@_option("--port", default=4747, envvar="AGL_PORT", type=click.IntRange(0, 65535), help="Port, or 0 for a free one.")
@_option("--backend", default="sqlite:///agl.db", envvar="AGL_BACKEND", metavar="URL", help="The store to serve.")
@_option("--token", envvar="AGL_TOKEN", help="Token that clients must send.")
@_option(
    "--token-file",
    envvar="AGL_TOKEN_FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with a token on each line: clients may send any, the first signs attempt tokens. A change takes effect "
    "within seconds.",
)
@click.option("--keep-days", type=click.FloatRange(0, min_open=True), help="Days until ended rollouts are deleted.")
@click.option("--keep-rollouts", type=click.IntRange(0), help="Delete the oldest ended rollouts above this number.")
@click.option("--wait", "wait_s", default=0.0, type=click.FloatRange(0), help="Seconds to wait for the database.")
@click.option("--access-log", is_flag=True, help="Log each request.")
@click.option("--read-only", is_flag=True, help="Serve the dashboard without its actions.")
@log_options
@click.pass_context
def command(
    context: click.Context,
    host: str,
    port: int,
    backend: str,
    token: str | None,
    token_file: Path | None,
    keep_days: float | None,
    keep_rollouts: int | None,
    wait_s: float,
    read_only: bool,
) -> None:
    """Serve a store over HTTP.

    Algorithms, runners and gateways on any machine share the store that this command serves.
    """
    if context.invoked_subcommand is not None:
        return
    from agentlightning.store.retention import Retention
    from agentlightning_plugins.shared.garbage_collection import relax_collector
    from agentlightning_plugins.shared.token import StoreTokens
    from agentlightning_plugins.shared.web.request import return_freed_memory
    from agentlightning_plugins.shared.web.server import raise_file_limit

    relax_collector()
    return_freed_memory()
    raise_file_limit()
    tokens = StoreTokens(token or None, token_file)
    retention = None
    if keep_days is not None or keep_rollouts is not None:
        retention = Retention(max_age_s=None if keep_days is None else keep_days * 86_400, max_rollouts=keep_rollouts)
    store = _open(backend, wait_s, retention=retention)
    asyncio.run(_serve(store, backend, host, port, tokens, read_only=read_only))


@command.command("compact")
@click.argument("url", default="sqlite:///agl.db", envvar="AGL_BACKEND")
def compact_command(url: str) -> None:
    """Shrink the file of a SQLite store by the space of deleted records.

    Other programs may go on using the file: this works in slices of 50 ms. Ctrl-C keeps what is done.
    """
    from agentlightning.store.factory import create_store
    from agentlightning.store.url import hide_password

    path = Path(url.partition(":///")[2])
    if url.startswith("sqlite:") and not path.is_file():
        raise ConfigError(f"there is no file {path}; give the URL of the store, as in sqlite:///agl.db")
    store = create_store(url)

    async def compact() -> None:
        before = shown = size = 0
        try:
            work = getattr(store, "compact", None)
            if work is None:
                raise ConfigError(f"{hide_password(url)} needs no compacting: only sqlite:/// stores do")
            async for size in work():
                before, shown = before or size, shown or size
                if shown - size > _SHOWN_BYTES:
                    echo(f"{size / 1e6:.1f} MB so far", err=True)
                    shown = size
        finally:
            await store.close()
        echo(f"{hide_password(url)}: {before / 1e6:.1f} MB before, {size / 1e6:.1f} MB now")

    asyncio.run(compact())


def _open(backend: str, wait_s: float, **settings: Any) -> LightningStore:
    """Opens the store; waits for its database to be reachable."""
    from agentlightning.store.factory import create_store

    deadline, pause_s = time.monotonic() + wait_s, 0.1
    while True:
        try:
            return create_store(backend, **settings)
        except StoreError as error:
            if time.monotonic() + pause_s > deadline:
                raise
            if pause_s == 0.1:
                logger.warning("%s; waiting for it for up to %g s", error, wait_s)
        time.sleep(pause_s * (0.5 + random.random()))
        pause_s = min(2 * pause_s, 2.0)


async def _serve(
    store: LightningStore, backend: str, host: str, port: int, tokens: StoreTokens, *, read_only: bool
) -> None:
    from agentlightning.plugin.registry import get_manager
    from agentlightning.store.url import hide_password
    from agentlightning_plugins.shared.web.request import client_url
    from agentlightning_plugins.shared.web.server import stop_on_signals
    from agentlightning_plugins.stores.http.server import LightningStoreServer

    manager = get_manager()
    pages = [
        manager.get("pages", name)(store, tokens.current, read_only=read_only) for name in manager.components("pages")
    ]
    loop = asyncio.get_running_loop()
    try:
        async with LightningStoreServer(store, host, port, token=tokens.current, pages=pages) as server:
            stop = stop_on_signals()
            lifetime = "" if store.capabilities["durable"] else " (not durable: lost when this process ends)"
            echo(f"Serving {hide_password(backend)}{lifetime} at {client_url(host, server.port)}")
            tasks = [loop.create_task(tokens.follow(server.replace_tokens))]
            if logger.isEnabledFor(logging.INFO):
                tasks.append(loop.create_task(_narrate(store)))
            await stop.wait()
            for task in tasks:
                task.cancel()
            echo("Stopping: finishing requests in flight, refusing new ones.")
    finally:
        closing = loop.create_task(store.close())
        done, _ = await asyncio.wait({closing}, timeout=_CLOSE_S)
        if not done:  # a normal exit would wait for its threads; acknowledged writes are on disk
            logger.warning("the database does not answer; ending without closing it")
            os._exit(1)
        closing.result()


async def _narrate(store: LightningStore) -> None:
    """Logs one line for each event, such as a claim or the end of a rollout, of all runs."""
    while True:
        try:
            async for event in store.subscribe(every_run=True):
                if (line := await _describe(store.with_run(event.run_id), event)) is not None:
                    logger.info("%s%s", "" if event.run_id == DEFAULT_RUN_ID else f"run {event.run_id}: ", line)
            return  # the store is closed
        except StoreError as error:
            logger.warning("events are missing here: %s", error)


async def _describe(view: LightningStore, event: Event) -> str | None:
    if event.kind != "attempt_finished":
        return _LINES[event.kind].format(**event.__dict__) if event.kind in _LINES else None
    n_spans = (await view.query_spans(event.rollout_id, event.attempt_id, limit=0)).total
    reward = "" if event.reward is None else f", reward {event.reward:g}"
    error = f": {event.error}" if event.error else ""
    return f"{event.rollout_id} {event.status} with {n_spans} spans{reward}{error}"
