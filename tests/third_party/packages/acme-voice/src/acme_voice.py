"""An own kind of component with two of them, an own hook's settings, a command and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import click

from agentlightning import LightningStore
from agentlightning.plugin import Component, Kind, echo, get_manager, hookimpl, with_store

plugin_interface = 1


class Voice(Protocol):
    """Reads a text aloud."""

    def speak(self, text: str) -> str: ...


class Loud:
    def __init__(self, *, marks: int = 1) -> None:
        self.marks = marks

    def speak(self, text: str) -> str:
        return text.upper() + "!" * self.marks


class Quiet:
    def speak(self, text: str) -> str:
        return text.lower()


@click.command("speak")
@click.argument("voice")
@click.argument("text")
def speak(voice: str, text: str) -> None:
    """Read TEXT aloud with VOICE."""
    echo(get_manager().create("voice", voice).speak(text))


@click.command("tally")
@with_store
async def tally(store: LightningStore, as_json: bool) -> None:
    """Count the rollouts of a store."""
    total = (await store.query_rollouts(limit=1)).total
    echo(f'{{"rollouts": {total}}}' if as_json else f"{total} rollouts")


async def write_names(store: LightningStore, directory: Path) -> None:
    rollouts = await store.query_rollouts()
    (directory / "names.txt").write_text("\n".join(rollout.rollout_id for rollout in rollouts.items))


@hookimpl
def kinds() -> list[Kind]:
    return [Kind("voice", f"{__name__}:Voice", "reads answers aloud")]


@hookimpl
def components() -> list[Component]:
    return [
        Component("voice", "loud", f"{__name__}:Loud"),
        Component("voice", "quiet", f"{__name__}:Quiet"),
        Component("report", "names", f"{__name__}:write_names", summary="names.txt"),
    ]


@hookimpl
def add_commands(cli: click.Group) -> None:
    cli.add_command(speak)
    cli.add_command(tally)
