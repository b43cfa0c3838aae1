"""``agl plugins``: lists what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning.plugin.hookspecs import hookimpl
from agentlightning.plugin.registry import Plugin, PluginManager, get_manager
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.terminal import json_option, print_json


@click.command("plugins")
@json_option
def command(as_json: bool) -> None:
    """List plugins, their components and missing packages."""
    manager = get_manager()
    rows = [_describe(manager, plugin) for plugin in manager.plugins.values()]
    if as_json:
        print_json(rows)
    else:
        _print_plugins(rows)
        print_table(("kind", "expects", "meaning"), sorted(map(astuple, manager.kinds.values())))


def _describe(manager: PluginManager, plugin: Plugin) -> dict[str, Any]:
    offers = []
    for component in plugin.offers:
        missing = manager.missing_requirements(component.kind, component.name)
        install = manager.install_command(component.kind, component.name) if missing else None
        offers.append({**asdict(component), "missing": missing, "install": install})
    described = {"plugin": plugin.name, "origin": plugin.origin, "state": plugin.state, "error": plugin.error}
    return {**described, "offers": offers}


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
        if row["error"]:
            state = "broken" if row["state"] == "broken" else "incomplete"
            echo(f"{state}: {row['plugin']} ({row['origin']}): {row['error']}")


@hookimpl
def add_commands(cli: click.Group) -> None:
    cli.add_command(command)
