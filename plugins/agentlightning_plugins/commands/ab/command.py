"""``agl ab``."""

from __future__ import annotations

import math
from typing import Any

import click

from agentlightning.cli import echo
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.commands.terminal import json_or_text, print_json, print_table, with_store
from agentlightning_plugins.statistics.comparison import compare_rollouts


@click.command("ab")
@click.argument("control")
@click.argument("treatment")
@with_store
async def compare(store: LightningStore, control: str, treatment: str, as_json: bool) -> None:
    """Compare the rewards of two groups of rollouts.

    CONTROL and TREATMENT each select rollouts by group name (`group` of the metadata), by other metadata, as in
    `variant=b`, or by resources: a snapshot or one version of it, as in `rs-1@3`. Failed rollouts count as 0;
    rollouts without a reward are excluded.
    """
    found = await compare_rollouts(store, _read(control), _read(treatment))
    sides = {"control": found.control, "treatment": found.treatment}
    if as_json:
        shown: dict[str, Any] = {
            name: {
                **{key: getattr(group, key) for key in ("name", "mean", "n", "failed", "unrated", "unfinished")},
                "tasks": len(group.rewards),
            }
            for name, group in sides.items()
        }
        shown |= {key: getattr(found, key) for key in ("difference", "low", "high", "p_value", "paired", "dropped")}
        shown |= {key: None for key in ("low", "high") if math.isinf(shown[key])}
        print_json(shown)
        return
    print_table(
        ("", "rollouts", "mean reward", "n", "failed", "without reward", "not finished"),
        [
            (name, group.name, f"{group.mean:.3f}", group.n, group.failed, group.unrated, group.unfinished)
            for name, group in sides.items()
        ],
    )
    how = "independent groups"
    if found.paired:
        how = "paired by task" + (f", {found.dropped} tasks of one group excluded" if found.dropped else "")
    elif found.control.has_users or found.treatment.has_users:
        how = f"{len(found.control.rewards)} against {len(found.treatment.rewards)} users"
    interval = "no interval" if math.isinf(found.low) else f"95 % interval [{found.low:+.3f}, {found.high:+.3f}]"
    echo(f"\ndifference {found.difference:+.3f}  {interval}  p = {found.p_value:.2g}  ({how})")
    echo("failed rollouts count as 0; rollouts without a reward are excluded")


def _read(text: str) -> str | dict[str, Any]:
    """Parses the argument for a group. Metadata values are parsed as JSON if possible: ``step=3`` is a number."""
    key, sign, value = text.partition("=")
    return {key: json_or_text(value)} if sign else text
