"""``agl plugins``: lists what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning.plugin.offer import Plugin
from agentlightning.plugin.registry import PluginManager, get_manager
from agentlightning_plugins.shared.lazy import lazy_commands
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
    for name, offer in manager.offers_of(plugin):
        missing = manager.missing_requirements(offer.component.kind, offer.full_name)
        install = manager.install_command(offer.component.kind, offer.full_name) if missing else None
        state = "broken" if offer.problem else "missing" if missing else "ready"
        described = {**asdict(offer.component), "selected_by": name, "state": state, "problem": offer.problem}
        offers.append({**described, "missing": missing, "install": install})
    hooks = [hook for hook in manager.hooks_of(plugin) if hook not in ("components", "kinds")]
    names = {"plugin": plugin.name, "full_name": plugin.full_name, "origin": plugin.origin}
    status = {"interface": plugin.interface, "state": plugin.state, "error": plugin.error}
    return {**names, **status, "hooks": hooks, "offers": offers}


def _print_plugins(rows: Sequence[dict[str, Any]]) -> None:
    unique = {
        (offer["kind"], offer["selected_by"], offer["target"]): {**offer, "origin": row["origin"]}
        for row in reversed(rows)
        for offer in row["offers"]
    }
    offers = [unique[key] for key in sorted(unique)]
    hooks = [("hook", hook, "ready", row["origin"], row["full_name"]) for row in rows for hook in row["hooks"]]
    print_table(
        ("kind", "name", "state", "from", "summary"),
        [*[(o["kind"], o["selected_by"], o["state"], o["origin"], o["summary"]) for o in offers], *sorted(hooks)],
    )
    missing: dict[str, list[str]] = {}
    for offer in offers:
        if offer["missing"]:
            missing.setdefault(offer["install"], []).append(offer["selected_by"])
    for command, names in missing.items():
        echo(f"{command}  installs the requirements of {', '.join(names)}")
    for row in rows:
        if row["error"]:
            echo(f"{'incomplete' if row['state'] == 'loaded' else row['state']}: {row['full_name']}: {row['error']}")


add_commands = lazy_commands(f"{__name__}:command")
