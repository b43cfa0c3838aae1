"""``agl gateway``: serves the gateway, shows its status, and pauses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from agentlightning.cli import echo
from agentlightning.errors import ConfigError
from agentlightning_plugins.gateway.operation import DEFAULT_PORT, ask_gateway, write_key
from agentlightning_plugins.shared.log_setup import log_options
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.terminal import DEFAULT_STORE, find_store

if TYPE_CHECKING:
    from collections.abc import Callable

_FINISH_S: Final = 6.0
"""As `agl store`: with the time for the last events and spans, SIGTERM ends the process within 10 s."""


@click.group("gateway", invoke_without_command=True)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file with model_list and other arguments of LLMProxy.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=URL",
    help="A model and the base URL of an OpenAI-compatible endpoint; repeat it for several backends or models.",
)
@click.option("--key-env", metavar="NAME", help="The environment variable with the API key of --model.")
@click.option(
    "--store",
    "where",
    metavar="URL",
    help="URL of the store that records the calls, or directory of a run. Default: AGL_STORE, else the store of "
    f"--config, else {DEFAULT_STORE}.",
)
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="The token of the store.")
@click.option(
    "--host", help="Address to listen on, 127.0.0.1 by default; on any address except loopback, calls need keys."
)
@click.option("--port", type=click.IntRange(0, 65535), help=f"{DEFAULT_PORT} by default; 0 chooses a free port.")
@log_options
@click.pass_context
def command(
    context: click.Context,
    config: Path | None,
    models: tuple[str, ...],
    key_env: str | None,
    where: str | None,
    token: str | None,
    host: str | None,
    port: int | None,
) -> None:
    """Serve the LLM gateway, show its status, or pause it.

    Agents call models through the gateway, which records each call of an attempt in the store. SIGHUP reads the models
    of --config again.
    """
    if context.invoked_subcommand is not None:
        return
    from agentlightning_plugins.shared.configuration.document import read_document

    def read_settings() -> dict[str, Any]:
        settings = {} if config is None else read_document(config).values
        settings["model_list"] = _model_list(settings, models, key_env)
        return settings

    settings = read_settings()
    settings.setdefault("finish_s", _FINISH_S)
    settings["port"] = port if port is not None else settings.get("port", DEFAULT_PORT)
    if host is not None:
        settings["host"] = host
    store = find_store(where, settings.pop("store", None))
    asyncio.run(_serve(settings, store, token, lambda: read_settings()["model_list"]))


_URL = click.argument("url", default=f"http://127.0.0.1:{DEFAULT_PORT}")
_TOKEN = click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="The token of the gateway's store.")


@command.command("status")
@_URL
@_TOKEN
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(url: str, token: str | None, as_json: bool) -> None:
    """Show models, backends and their health."""
    status = ask_gateway(url, token, "status")
    if as_json:
        echo(json.dumps(status, indent=2))
    else:
        _print_status(status)


@command.command("pause")
@_URL
@_TOKEN
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(0, 600),
    help="Wait up to this many seconds for the calls in flight; exit code 1 if some are left.",
)
def pause_command(url: str, token: str | None, drain_s: float | None) -> None:
    """Make new calls wait while the weights of the models change."""
    status = ask_gateway(url, token, "pause", {})
    if drain_s is not None and not ask_gateway(url, token, "drain", {"timeout_s": drain_s})["drained"]:
        raise click.ClickException(f"paused, but calls are still in flight after {drain_s:g} s")
    echo("paused" if drain_s is not None else f"paused, {status['in_flight']} calls in flight")


@command.command("resume")
@_URL
@_TOKEN
@click.option("--weight-version", type=int, help="The version of the new weights.")
def resume_command(url: str, token: str | None, weight_version: int | None) -> None:
    """Let calls continue."""
    echo(f"serving, {_version(ask_gateway(url, token, 'resume', {'weight_version': weight_version}))}")


def _print_status(status: dict[str, Any]) -> None:
    head = ("model", "backend", "served as", "provider", "weight", "in flight", "health")
    rows = [
        [
            *(backend[key] for key in ("model", "endpoint", "served_model", "provider")),
            *(f"{backend['weight']:g}", backend["in_flight"]),
            "up" if backend["up"] else f"down: {backend['failure']}",
        ]
        for backend in status["backends"]
    ]
    print_table(head, rows)
    echo(
        f"{'paused' if status['paused'] else 'serving'}, {status['in_flight']} calls in flight, "
        f"{status['waiting']} waiting; {_version(status)}; "
        f"{status['spans_queued']} spans waiting to be stored, {status['spans_lost']} lost"
    )


def _version(status: dict[str, Any]) -> str:
    version = status["weight_version"]
    return f"weight version {'unknown' if version is None else version}"


async def _serve(settings: dict[str, Any], url: str, token: str | None, read_models: Callable[[], list[Any]]) -> None:
    from agentlightning.plugin.settings import bind_settings
    from agentlightning.store.factory import create_store
    from agentlightning_plugins.gateway.proxy import LLMProxy
    from agentlightning_plugins.shared.garbage_collection import relax_collector
    from agentlightning_plugins.shared.web.request import return_freed_memory
    from agentlightning_plugins.shared.web.server import raise_file_limit, stop_on_signals

    def reload() -> None:
        try:
            proxy.update_model_list(read_models())
        except (ConfigError, OSError) as error:
            echo(f"The models stay as they are: {error}", err=True)
        else:
            echo("The models were read again.")

    relax_collector()
    raise_file_limit()
    return_freed_memory()
    async with contextlib.AsyncExitStack() as stack:
        store = create_store(url, token=token if url.startswith("http") else None)
        stack.push_async_callback(store.close)
        proxy = LLMProxy(**bind_settings(LLMProxy, {**settings, "store": store}, "agl gateway"))
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        port = urlsplit(proxy.endpoint).port
        if store.token is None and port is not None:  # operators use the store's token if it has one
            stack.callback(write_key(port, proxy.operator_key).unlink, missing_ok=True)
        stop = stop_on_signals()
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, lambda: asyncio.ensure_future(asyncio.to_thread(reload))
        )
        url = proxy.endpoint.removesuffix("/v1")
        echo(f"Serving {', '.join(proxy.models) or 'no model'} at {url}; see: agl gateway status {url}")
        await stop.wait()
        echo("Stopping after the recorded spans are stored.")


def _model_list(settings: dict[str, Any], models: tuple[str, ...], key_env: str | None) -> list[Any]:
    if key_env is not None and key_env not in os.environ:
        raise ConfigError(f"--key-env {key_env}: this environment variable is not set")
    key = {} if key_env is None else {"api_key": f"os.environ/{key_env}"}
    entries = list(settings.get("model_list") or [])
    for model in models:
        name, _, endpoint = model.partition("=")
        entries.append({"model": name, "endpoint": endpoint, **key})
    if not entries:
        raise ConfigError("no model to serve: give --model NAME=URL, or --config FILE with a model_list")
    return entries
