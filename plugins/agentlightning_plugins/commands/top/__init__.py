"""``agl top``: shows the activity of a store in a terminal."""

from __future__ import annotations

import asyncio

import click

from agentlightning.cli import printable
from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.lazy import lazy_commands
from agentlightning_plugins.shared.terminal import StoreCommand, json_option, print_json, store_option, use_store


@click.command("top", cls=StoreCommand)
@store_option
@click.option("--run", "run_id", metavar="NAME", help="Name of the run; default is the newest in progress.")
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds per update.")
@click.option("--once", is_flag=True, help="Print the state once and exit, as without a terminal.")
@json_option
def command(where: str | None, run_id: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Show queue, workers, reward, throughput and errors of a store, until Ctrl-C."""
    use_store(where, None, lambda store: _watch(store, run_id, interval, once=once, as_json=as_json))


async def _watch(store: LightningStore, run_id: str | None, interval: float, *, once: bool, as_json: bool) -> None:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

    from agentlightning_plugins.commands.top.screen import draw, read_snapshot

    console = Console(highlight=False, markup=False, emoji=False)
    first = await read_snapshot(store, run_id)
    if as_json:
        print_json(first)
        return
    if once or not console.is_terminal:
        console.width = console.width if console.is_terminal else 200
        console.print(draw(first))
        return
    with Live(draw(first), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            try:
                shown: RenderableType = draw(await read_snapshot(store, run_id))
            except StoreError as error:
                shown = Text(f"the store does not answer: {printable(str(error))}", style="red")
            live.update(shown, refresh=True)


add_commands = lazy_commands(f"{__name__}:command")
