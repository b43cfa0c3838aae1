"""``agl gateway``: serves the gateway by itself, shows how one does, and pauses it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

from agentlightning.cli import print_table
from agentlightning.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from agentlightning_plugins.gateway.proxy import LLMProxy

DEFAULT_PORT: Final = 4000
_ANSWER_S: Final = 10.0


@click.group("gateway", invoke_without_command=True)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="YAML: model_list, ...")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=URL",
    help="A model and the base URL of an OpenAI-compatible endpoint; repeat it for several backends or models.",
)
@click.option("--key-env", metavar="NAME", help="The environment variable that holds the API key of --model.")
@click.option("--store", "store_url", default="http://127.0.0.1:4747", show_default=True, help="Where calls go.")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Of the store.")
@click.option("--host", help="Address to listen on, 127.0.0.1 by default; beyond loopback calls need keys.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"{DEFAULT_PORT} by default; 0 takes a free one.")
@click.pass_context
def command(
    context: click.Context,
    config: Path | None,
    models: tuple[str, ...],
    key_env: str | None,
    store_url: str,
    token: str | None,
    host: str | None,
    port: int | None,
) -> None:
    """Serve the LLM gateway, show how one does, or pause it.

    Agents call models through it, and each call of an attempt is recorded in the store. SIGHUP reads the models of
    --config again.
    """
    if context.invoked_subcommand is None:
        asyncio.run(_serve(config, models, key_env, store_url, token, host, port))


@command.command("status")
@click.argument("url", default=f"http://127.0.0.1:{DEFAULT_PORT}")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Of the gateway's store, where keys are required.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(url: str, token: str | None, as_json: bool) -> None:
    """Show models, backends and their health."""
    status = ask_gateway(url, token, "status")
    if as_json:
        click.echo(json.dumps(status, indent=2))
    else:
        _print_status(status)


@command.command("pause")
@click.argument("url", default=f"http://127.0.0.1:{DEFAULT_PORT}")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Of the gateway's store, if it has one.")
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(0, 600),
    help="Wait so many seconds for the calls in flight; exit code 1 says that some are left.",
)
def pause_command(url: str, token: str | None, drain_s: float | None) -> None:
    """Make new calls wait while the weights of the models change."""
    status = ask_gateway(url, token, "pause", {})
    if drain_s is not None and not ask_gateway(url, token, "drain", {"timeout_s": drain_s})["drained"]:
        raise click.ClickException(f"paused, but calls are still in flight after {drain_s:g} s")
    click.echo("paused" if drain_s is not None else f"paused, {status['in_flight']} calls in flight")


@command.command("resume")
@click.argument("url", default=f"http://127.0.0.1:{DEFAULT_PORT}")
@click.option("--token", envvar="AGL_TOKEN", show_envvar=True, help="Of the gateway's store, if it has one.")
@click.option("--weight-version", type=int, help="Of the weights that calls get from now on.")
def resume_command(url: str, token: str | None, weight_version: int | None) -> None:
    """Let calls go on."""
    status = ask_gateway(url, token, "resume", {"weight_version": weight_version})
    click.echo(f"serving, weight version {'unknown' if status['weight_version'] is None else status['weight_version']}")


def ask_gateway(url: str, token: str | None, path: str, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    """Asks a gateway how it does (``status``), or to ``pause``, ``drain`` or ``resume``.

    Args:
        url: of the gateway, with or without ``/v1``.
        token: of its store.
        path: what to ask.
        wanted: what to post; None gets.

    Raises:
        ConfigError: not an http(s) URL.
        StoreError: nobody answers there, or not as a gateway does.
    """
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise ConfigError(f"gateway {url!r} is not a URL; write http://127.0.0.1:{DEFAULT_PORT}")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = None if wanted is None else json.dumps(wanted).encode()
    patience_s = _ANSWER_S + (wanted or {}).get("timeout_s", 0.0)
    try:
        request = Request(f"{root}/{path}", body, headers)  # noqa: S310 # the scheme was looked at
        with urlopen(request, timeout=patience_s) as answer:  # noqa: S310 # it is the request above
            said: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        with error:  # which holds the connection
            advice = "; set --token or AGL_TOKEN" if error.code in (401, 403) else ""
        raise StoreError(f"no gateway answers at {root}: {error}{advice}") from error
    except (URLError, OSError, ValueError) as error:
        raise StoreError(f"no gateway answers at {root}: {error}") from error
    return said


def _print_status(status: dict[str, Any]) -> None:
    print_table(
        ("model", "backend", "served as", "provider", "weight", "in flight", "health"),
        [
            (
                row["model"],
                row["endpoint"],
                row["served_model"],
                row["provider"],
                f"{row['weight']:g}",
                row["in_flight"],
                "up" if row["up"] else f"down: {row['failure']}",
            )
            for row in status["backends"]
        ],
    )
    version = status["weight_version"]
    state = "paused" if status["paused"] else "serving"
    click.echo(
        f"{state}, {status['in_flight']} calls in flight, {status['waiting']} waiting; "
        f"weight version {'unknown' if version is None else version}; "
        f"{status['spans_queued']} spans on their way to the store, {status['spans_lost']} lost"
    )


async def _serve(
    config: Path | None,
    models: tuple[str, ...],
    key_env: str | None,
    store_url: str,
    token: str | None,
    host: str | None,
    port: int | None,
) -> None:
    from agentlightning.plugin.settings import bind_settings
    from agentlightning.store.factory import create_store
    from agentlightning_plugins.garbage_collection import relax_collector
    from agentlightning_plugins.gateway.proxy import LLMProxy

    relax_collector()
    settings = _read_settings(config)
    settings["model_list"] = _model_list(settings, models, key_env)
    settings["port"] = port if port is not None else settings.get("port", DEFAULT_PORT)
    if host is not None:
        settings["host"] = host
    url = settings.pop("store", store_url)
    store = create_store(url, token=token if url.startswith("http") else None)
    try:
        proxy = LLMProxy(**bind_settings(LLMProxy, {**settings, "store": store}, "agl gateway"))
        await proxy.start()
        try:
            await _wait(proxy, config, models, key_env)
        finally:
            await proxy.stop()
    finally:
        await store.close()


async def _wait(proxy: LLMProxy, config: Path | None, models: tuple[str, ...], key_env: str | None) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def reload() -> None:
        try:
            proxy.update_model_list(_model_list(_read_settings(config), models, key_env))
        except (ConfigError, OSError) as error:
            click.echo(f"The models stay as they are: {error}", err=True)
        else:
            click.echo("The models were read again.")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: asyncio.ensure_future(asyncio.to_thread(reload)))
    shown = proxy.endpoint.removesuffix("/v1")
    click.echo(f"Serving {', '.join(proxy.models) or 'no model'} at {shown}; see: agl gateway status {shown}")
    await stop.wait()
    for number in (signal.SIGINT, signal.SIGTERM):  # the second one does not wait for calls to finish
        loop.remove_signal_handler(number)
    click.echo("Stopping: what was recorded is stored first.")


def _read_settings(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    import yaml

    try:
        settings = yaml.safe_load(config.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{config} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{config} holds {settings!r}; give a mapping with model_list")
    return settings


def _model_list(settings: dict[str, Any], models: tuple[str, ...], key_env: str | None) -> list[Any]:
    entries = list(settings.get("model_list") or [])
    for model in models:
        name, _, endpoint = model.partition("=")
        entry = {"model": name, "endpoint": endpoint}
        if key_env is not None:
            if key_env not in os.environ:
                raise ConfigError(f"--key-env {key_env}: this environment variable is not set")
            entry["api_key"] = f"os.environ/{key_env}"
        entries.append(entry)
    if not entries:
        raise ConfigError("no model to serve: give --model NAME=URL, or --config FILE with a model_list")
    return entries
