"""The ``agl`` command: a dispatcher, and ``agl plugins``. Every other command is a plugin's."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import click

from agentlightning.errors import LightningError
from agentlightning.plugins import Plugin, PluginManager, get_manager
from agentlightning.version import __version__

logger = logging.getLogger("agentlightning")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="lightning", prog_name="agl")
def cli() -> None:
    """Lightning: make AI agents that already exist better."""


@cli.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins_command(as_json: bool) -> None:
    """Lists plugins, what they offer, and what is missing."""
    manager = get_manager()
    rows = [_describe(manager, plugin) for plugin in manager.plugins.values()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


def _describe(manager: PluginManager, plugin: Plugin) -> dict[str, Any]:
    offers = []
    for component in plugin.offers:
        missing = manager.missing_requirements(component.kind, component.name)
        offers.append(
            {
                "kind": component.kind,
                "name": component.name,
                "summary": component.summary,
                "target": component.target,
                "extra": component.extra,
                "missing": missing,
                "install": manager.install_command(component.kind, component.name) if missing else None,
            }
        )
    return {
        "plugin": plugin.name,
        "origin": plugin.origin,
        "state": plugin.state,
        "error": plugin.error,
        "offers": offers,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("kind", "name", "plugin", "what it is", "state"):
        table.add_column(column, overflow="fold")
    offers = [(row, offer) for row in rows for offer in row["offers"]]
    for row, offer in sorted(offers, key=lambda pair: (pair[1]["kind"], pair[1]["name"])):
        state = escape(offer["install"]) if offer["missing"] else "ready"
        table.add_row(offer["kind"], offer["name"], f"{row['plugin']} ({row['origin']})", offer["summary"], state)
    for row in rows:
        if row["state"] != "loaded":
            table.add_row("", "", f"{row['plugin']} ({row['origin']})", "", escape(f"broken: {row['error']}"))
    Console(highlight=False).print(table)


def main() -> None:
    """Runs ``agl``. Our own errors become one line and exit code 2, Ctrl-C becomes 130."""
    manager = get_manager()
    for implementation in manager.hook.add_commands.get_hookimpls():
        try:
            implementation.function(cli)
        except Exception as error:  # isolation point: one plugin's commands must not take the others'
            name = implementation.plugin_name
            logger.warning("plugin %s could not add its commands: %s: %s", name, type(error).__name__, error)
    try:
        cli.main(prog_name="agl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except LightningError as error:
        click.echo(f"agl: {type(error).__name__}: {error}", err=True)
        sys.exit(2)
