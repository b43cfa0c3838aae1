"""The command ``agl doctor``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentlightning.cli import echo
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.terminal import json_option, json_or_text, print_json

if TYPE_CHECKING:
    from agentlightning_plugins.shared.configuration.document import ConfigDocument


@click.command("doctor")
@click.argument("agent")
@click.option("--endpoint", metavar="URL", help="OpenAI-compatible model server; default is a scripted one.")
@click.option("--model", help="Name of the model; default is the first that the server lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="API key of the model server.")
@click.option("--task", metavar="JSON|TEXT", help="The task; default is the first task of CONFIG, or a greeting.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="A function reward(task, output, rollout).")
@click.option("--resource", "resources", multiple=True, metavar="NAME=TEXT", help="A prompt of the agent.")
@click.option("--resources", "learned", metavar="RUN_DIR|URL", help="Use the prompts and model that a run learned.")
@click.option("--tracer", default="otel", show_default=True, help="The tracer.")
@click.option("--agent-match", metavar="REGEX", help="Train only the agents whose name matches.")
@click.option(
    "--tunes",
    type=click.Choice(["weights", "prompts"]),
    help="What training changes; default: as in CONFIG, else weights.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Time limit of the rollout in seconds.",
)
@click.option("--trust", is_flag=True, help="Read files of --resources that can run code: shards of verl.")
@json_option
def command(
    agent: str,
    endpoint: str | None,
    model: str | None,
    api_key: str | None,
    task: str | None,
    resources: tuple[str, ...],
    tunes: str | None,
    learned: str | None,
    trust: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Run one rollout of AGENT and check that training could learn from it.

    AGENT is module:attribute, path/to/file.py:attribute, demo, or a configuration file of `agl train`, which supplies
    the agent, the resources and the first task. The exit code is 1 if a check fails.
    """
    from agentlightning_plugins.commands.doctor.run import Request, run_checks
    from agentlightning_plugins.shared.configuration.assembly import is_config_file
    from agentlightning_plugins.shared.configuration.document import enter_folder, read_document
    from agentlightning_plugins.shared.configuration.run_directory import learned_resources

    given: dict[str, Any] = {"agent": agent}
    if is_config_file(agent):
        document = read_document(Path(agent))
        from_start = enter_folder(Path(agent))
        given = _read_config(document)
        learned = learned and from_start(learned)
        settings["reward"] = settings["reward"] and from_start(settings["reward"])
    with learned_resources(learned, trust=trust) as found:
        _add_resources(given, found)
        if endpoint is not None:
            given |= {"endpoint": endpoint, "model": model, "api_key": api_key}
        elif model is not None:
            given["model"] = model
        if task is not None:
            given["task"] = json_or_text(task)
        if tunes is not None:
            given |= {"trains_weights": tunes == "weights", "reads_calls": True}
        for text in resources:
            name, separator, value = text.partition("=")
            if not separator or not name:
                raise click.UsageError(f"--resource {text!r}: write NAME=TEXT")
            given["resources"][name] = value
        checks = asyncio.run(run_checks(Request(**settings, **given)))
    is_well = all(check.state != "broken" for check in checks)
    if as_json:
        print_json({"ok": is_well, "checks": [check._asdict() for check in checks]})
    else:
        for check in checks:
            fix = f" -> {check.fix}" if check.fix else ""
            echo(f"{_SHOWN[check.state]:9} {check.name:12} {check.text}{fix}")
    if not is_well:
        sys.exit(1)


_SHOWN = {"ok": "ok", "broken": "BROKEN", "unchecked": "-"}


def _read_config(document: ConfigDocument) -> dict[str, Any]:
    """Reads the fields of ``Request`` from a configuration."""
    from agentlightning.plugin.settings import read_spec
    from agentlightning.resources import LLM, resolve_secrets
    from agentlightning_plugins.shared.configuration.assembly import expand, find_class, load_data, load_resources
    from agentlightning_plugins.shared.configuration.config import read_config
    from agentlightning_plugins.shared.token import find_token

    config = read_config(document)
    resources = resolve_secrets(load_resources(config.resources or {}))
    given: dict[str, Any] = {"agent": config.agent}
    _add_resources(given, resources)
    if (data := config.data.train or config.data.val) is not None:
        given["task"] = load_data(data)[0]
    if config.algorithm is not None:
        settings = read_spec(config.algorithm)
        adapter = find_class("algorithm", settings["name"]).default_adapter
        given |= {"trains_weights": adapter == "triplet", "reads_calls": adapter is not None}
        backend = read_spec(settings.get("backend") or "transformers")
        if backend["name"] == "transformers" and "tool_format" not in backend and "model" in settings:
            given["local_model"] = settings["model"]
    if isinstance(config.gateway, str) and "://" in config.gateway:
        url = expand(config.gateway).rstrip("/").removesuffix("/v1")
        given |= {"endpoint": f"{url}/v1", "api_key": find_token(), "gateway_store": expand(config.store)}
    elif isinstance(config.gateway, Mapping):
        entries = [entry.get("litellm_params", entry) for entry in config.gateway.get("model_list", ())]
        for entry in entries[:1]:
            url, name = entry.get("endpoint") or entry.get("api_base"), str(entry["model"])
            if url is not None:
                llm = LLM(endpoint=url, model=name.removeprefix("hosted_vllm/"), api_key=entry.get("api_key"))
                _add_resources(given, resolve_secrets(load_resources({"llm": llm.model_dump()})))
    return given


def _add_resources(given: dict[str, Any], resources: Mapping[str, Any]) -> None:
    """Adds resources to the fields of ``Request``; a model among them is the endpoint to check."""
    from agentlightning.resources import LLM

    given["resources"] = {**given.get("resources", {}), **resources}
    for resource in resources.values():
        if isinstance(resource, LLM):
            given |= {"endpoint": resource.endpoint, "model": resource.model, "api_key": resource.api_key}


add_commands = lazy_commands(f"{__name__}:command")
