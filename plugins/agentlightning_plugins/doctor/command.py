"""The command ``agl doctor``."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click


@click.command("doctor")
@click.argument("agent")
@click.option("--endpoint", metavar="URL", help="OpenAI-compatible model server; default is a scripted one.")
@click.option("--model", help="Its model; default is the first that it lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="What the model server wants to see.")
@click.option("--task", metavar="JSON|TEXT", help="What the agent is given; default is a greeting.")
@click.option("--reward", metavar="MODULE:FUNCTION", help="reward(task, output, rollout), as Trainer.fit takes it.")
@click.option("--resource", "resources", multiple=True, metavar="NAME=TEXT", help="A prompt that the agent asks for.")
@click.option("--tracer", default="otel", show_default=True, help="Which tracer records it.")
@click.option("--agent-match", metavar="REGEX", help="Train only the agents with such a name.")
@click.option(
    "--tunes", type=click.Choice(["weights", "prompts"]), default="weights", show_default=True, help="What is learned."
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
    tunes: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Run one rollout of AGENT and say which link to its training is broken.

    AGENT is module:attribute, path/to/file.py:attribute, or demo. The exit code is 1 when a link is broken.
    """
    from agentlightning_plugins.doctor.checkup import NO_TASK, Order, check_up

    order = Order(
        agent=agent,
        endpoint=endpoint,
        model=model,
        api_key=api_key if endpoint is not None else None,
        task=NO_TASK if task is None else _read_task(task),
        reward=reward,
        resources=dict(_read_resource(text) for text in resources),
        tracer=tracer,
        agent_match=agent_match,
        trains_weights=tunes == "weights",
        timeout_s=timeout_s,
    )
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
