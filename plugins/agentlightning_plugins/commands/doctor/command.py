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
@click.option("--model", help="Its model; default is the first that it lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="What the model server wants to see.")
@click.option("--task", metavar="JSON|TEXT", help="What the agent is given; default is the first one, or a greeting.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="reward(task, output, rollout), as Trainer.fit takes it.")
@click.option("--resource", "resources", multiple=True, metavar="NAME=TEXT", help="A prompt that the agent asks for.")
@click.option("--tracer", default="otel", show_default=True, help="Which tracer records it.")
@click.option("--agent-match", metavar="REGEX", help="Train only the agents with such a name.")
@click.option(
    "--tunes", type=click.Choice(["weights", "prompts"]), help="What is learned; default as CONFIG says, or weights."
)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds that the rollout may take.")
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
    """Run one rollout of AGENT and say which link to its training is broken.

    AGENT is module:attribute, path/to/file.py:attribute, demo, or a configuration file of `agl train`, whose agent,
    resources and first task are taken. The exit code is 1 when a link is broken.
    """
    from agentlightning_plugins.commands.doctor.checkup import Order, check_up

    is_config = Path(agent).suffix in (".yaml", ".yml", ".toml")
    given: dict[str, Any] = _read_config(Path(agent)) if is_config else {"agent": agent}
    if endpoint is not None:
        given |= {"endpoint": endpoint, "model": model, "api_key": api_key}
    elif model is not None:
        given["model"] = model
    if task is not None:
        given["task"] = _read_task(task)
    if tunes is not None:
        given["trains_weights"] = tunes == "weights"
    given["resources"] = {**given.get("resources", {}), **dict(_read_resource(text) for text in resources)}
    order = Order(reward=reward, tracer=tracer, agent_match=agent_match, timeout_s=timeout_s, **given)
    links = asyncio.run(check_up(order))
    is_well = all(link.state != "broken" for link in links)
    if as_json:
        click.echo(json.dumps({"ok": is_well, "links": [link._asdict() for link in links]}, indent=2))
    else:
        for link in links:
            mend = f" -> {link.mend}" if link.mend else ""
            click.echo(f"{_SHOWN[link.state]:9} {link.name:12} {link.text}{mend}")
    if not is_well:
        sys.exit(1)


_SHOWN = {"ok": "ok", "broken": "BROKEN", "unchecked": "-"}


def _read_config(path: Path) -> dict[str, Any]:
    """What a configuration says of the agent, as fields of an order."""
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
