"""The command ``agl doctor``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click


@click.command("doctor")
@click.argument("agent")
@click.option("--endpoint", metavar="URL", help="OpenAI-compatible model server; default is a scripted one.")
@click.option("--model", help="Name of the model; default is the first that the server lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="API key of the model server.")
@click.option("--task", metavar="JSON|TEXT", help="The task; default is the first of CONFIG, or a greeting.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="A function reward(task, output, rollout).")
@click.option("--resource", "resources", multiple=True, metavar="NAME=TEXT", help="A prompt of the agent.")
@click.option("--tracer", default="otel", show_default=True, help="The tracer.")
@click.option("--agent-match", metavar="REGEX", help="Train only the agents whose name matches.")
@click.option(
    "--tunes",
    type=click.Choice(["weights", "prompts"]),
    help="What training changes; default: as in CONFIG, else weights.",
)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Time limit of the rollout in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    agent: str,
    endpoint: str | None,
    model: str | None,
    api_key: str | None,
    task: str | None,
    reward: str | None,
    resources: tuple[str, ...],
    tracer: str,
    agent_match: str | None,
    tunes: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Run one rollout of AGENT and check that training could learn from it.

    AGENT is module:attribute, path/to/file.py:attribute, demo, or a configuration file of `agl train`, which supplies
    agent, resources and first task. The exit code is 1 when a check fails.
    """
    from agentlightning_plugins.commands.configuration.assembly import is_config_file
    from agentlightning_plugins.commands.doctor.run import Request, run_checks

    given: dict[str, Any] = _read_config(Path(agent)) if is_config_file(agent) else {"agent": agent}
    if endpoint is not None:
        given |= {"endpoint": endpoint, "model": model, "api_key": api_key}
    elif model is not None:
        given["model"] = model
    if task is not None:
        given["task"] = _read_task(task)
    if tunes is not None:
        given["trains_weights"] = tunes == "weights"
    given["resources"] = {**given.get("resources", {}), **dict(_read_resource(text) for text in resources)}
    request = Request(reward=reward, tracer=tracer, agent_match=agent_match, timeout_s=timeout_s, **given)
    checks = asyncio.run(run_checks(request))
    is_well = all(check.state != "broken" for check in checks)
    if as_json:
        click.echo(json.dumps({"ok": is_well, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        for check in checks:
            fix = f" -> {check.fix}" if check.fix else ""
            click.echo(f"{_SHOWN[check.state]:9} {check.name:12} {check.text}{fix}")
    if not is_well:
        sys.exit(1)


_SHOWN = {"ok": "ok", "broken": "BROKEN", "unchecked": "-"}


def _read_config(path: Path) -> dict[str, Any]:
    """Reads the fields of ``Request`` from a configuration."""
    from agentlightning.plugin.registry import get_manager
    from agentlightning.resources import LLM, read_resources
    from agentlightning_plugins.commands.configuration.assembly import expand, load_data
    from agentlightning_plugins.commands.configuration.config import read_config
    from agentlightning_plugins.commands.configuration.document import read_document

    config = read_config(read_document(path))
    resources = read_resources(expand(config.resources or {}))
    given: dict[str, Any] = {"agent": config.agent, "resources": resources}
    for data in (config.data.train, config.data.val):
        if data is not None:
            given["task"] = load_data(data)[0]
            break
    for resource in resources.values():
        if isinstance(resource, LLM):
            given |= {"endpoint": resource.endpoint, "model": resource.model, "api_key": resource.api_key}
    if config.algorithm is not None:
        name = config.algorithm if isinstance(config.algorithm, str) else config.algorithm["name"]
        given["trains_weights"] = get_manager().get("algorithm", name).default_adapter == "triplet"
    return given


def _read_task(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_resource(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(f"--resource {text!r}: write NAME=TEXT")
    return name, value
