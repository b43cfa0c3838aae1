"""The ``agl`` command: a dispatcher, and ``agl plugins``. Plugins add all other commands."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click

from agentlightning.errors import LightningError
from agentlightning.logging import PrintableFormatter, printable
from agentlightning.plugin.registry import Plugin, PluginManager, get_manager
from agentlightning.version import __version__

logger = logging.getLogger("agentlightning")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="lightning", prog_name="agl")
def cli() -> None:
    """Lightning: improve existing AI agents."""


@cli.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins_command(as_json: bool) -> None:
    """List plugins, their components and missing packages."""
    manager = get_manager()
    rows = [_describe(manager, plugin) for plugin in manager.plugins.values()]
    if as_json:
        echo(json.dumps(rows, indent=2))
    else:
        _print_plugins(rows)


def _describe(manager: PluginManager, plugin: Plugin) -> dict[str, Any]:
    offers = []
    for component in plugin.offers:
        missing = manager.missing_requirements(component.kind, component.name)
        install = manager.install_command(component.kind, component.name) if missing else None
        offers.append({**asdict(component), "missing": missing, "install": install})
    return {
        "plugin": plugin.name,
        "origin": plugin.origin,
        "state": plugin.state,
        "error": plugin.error,
        "offers": offers,
    }


def _print_plugins(rows: Sequence[dict[str, Any]]) -> None:
    unique = {
        (offer["kind"], offer["name"], offer["target"]): {**offer, "origin": row["origin"]}
        for row in reversed(rows)
        for offer in row["offers"]
    }
    offers = [unique[key] for key in sorted(unique)]
    print_table(
        ("kind", "name", "state", "from", "summary"),
        [(o["kind"], o["name"], "missing" if o["missing"] else "ready", o["origin"], o["summary"]) for o in offers],
    )
    missing: dict[str, list[str]] = {}
    for offer in offers:
        if offer["missing"]:
            missing.setdefault(offer["install"], []).append(offer["name"])
    for command, names in missing.items():
        echo(f"{command}  installs the requirements of {', '.join(names)}")
    for row in rows:
        if row["state"] != "loaded":
            echo(f"broken: {row['plugin']} ({row['origin']}): {row['error']}")


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints text with its terminal escapes shown, to standard error if ``err``. Commands print with this only."""
    click.echo(printable(text), err=err, nl=nl)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows in columns. Only the last column is folded, and only at a terminal; no text is cut."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    lines = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    *widths, last = (max(map(cell_len, cells)) for cells in zip(columns, *lines, strict=True))
    left = sum(width + 2 for width in widths)
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        last = min(last, max(24, console.width - left - 2))
    console.width = left + last + 2  # rich before 14.2 pads the last column too
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column, width in zip(columns, (*widths, last), strict=True):
        table.add_column(column, overflow="fold", width=width)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def add_plugin_commands(manager: PluginManager) -> None:
    """Adds the commands of every plugin; a plugin that fails is reported and left out."""
    for implementation in manager.hook.add_commands.get_hookimpls():
        try:
            implementation.function(cli)
        except Exception as error:  # isolation point: one plugin's error must not remove the commands of others
            name = implementation.plugin_name
            logger.warning("plugin %s could not add its commands: %s: %s", name, type(error).__name__, error)


def main() -> None:
    """Runs ``agl``. Our own errors become one line and exit code 2, Ctrl-C becomes 130."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    add_plugin_commands(get_manager())
    try:
        cli.main(prog_name="agl", standalone_mode=False)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        echo(said.getvalue(), err=True, nl=False)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        echo("stopped", err=True)
        sys.exit(130)
    except LightningError as error:
        echo(f"agl: {type(error).__name__}: {error}", err=True)
        sys.exit(2)
