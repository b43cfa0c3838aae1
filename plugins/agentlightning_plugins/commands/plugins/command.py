"""``agl plugins``: lists what is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning.plugin.registry import Plugin, PluginManager, get_manager


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
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
    described = {"plugin": plugin.name, "origin": plugin.origin, "state": plugin.state, "error": plugin.error}
    return {**described, "offers": offers}


def _print_plugins(rows: Sequence[dict[str, Any]]) -> None:
    unique = {
        (offer["kind"], offer["name"], offer["target"]): {**offer, "origin": row["origin"]}
        for row in reversed(rows)
        for offer in row["offers"]
    }
    offers = [unique[key] for key in sorted(unique)]
    lines = [("kind", "name", "state", "from", "summary")]
    lines += [(o["kind"], o["name"], "missing" if o["missing"] else "ready", o["origin"], o["summary"]) for o in offers]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    missing: dict[str, list[str]] = {}
    for offer in offers:
        if offer["missing"]:
            missing.setdefault(offer["install"], []).append(offer["name"])
    for command, names in missing.items():
        echo(f"{command}  installs the requirements of {', '.join(names)}")
    for row in rows:
        if row["state"] != "loaded":
            echo(f"broken: {row['plugin']} ({row['origin']}): {row['error']}")
