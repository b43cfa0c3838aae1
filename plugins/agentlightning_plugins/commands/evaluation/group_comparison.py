"""``agl compare CONTROL TREATMENT``: compares two groups of recorded rollouts."""

from __future__ import annotations

import math
from typing import Any

from agentlightning.cli import echo
from agentlightning_plugins.shared.rendering.table import print_table
from agentlightning_plugins.shared.statistics.comparison import Comparison, compare_rollouts
from agentlightning_plugins.shared.terminal import json_or_text, print_json, use_store


def compare_recorded(
    control: str, treatment: str, where: str | None, run: str | None, as_json: bool
) -> list[dict[str, Any]]:
    """Compares two groups of rollouts, prints the result, and returns a row for each group."""
    sides = _read(control), _read(treatment)
    found = use_store(where, run, lambda store: compare_rollouts(store, *sides))
    if as_json:
        print_json(_to_json(found))
    else:
        _print(found)
    return [{}, {"label": found.treatment.name, "difference": found.difference, "p": found.p_value}]


def _read(text: str) -> str | dict[str, Any]:
    """Parses the argument for a group. Metadata values are parsed as JSON if possible: ``step=3`` is a number."""
    key, sign, value = text.partition("=")
    return {key: json_or_text(value)} if sign else text


def _to_json(found: Comparison) -> dict[str, Any]:
    shown: dict[str, Any] = {
        name: {
            **{key: getattr(group, key) for key in ("name", "mean", "n", "failed", "unrated", "unfinished")},
            "tasks": len(group.rewards),
        }
        for name, group in (("control", found.control), ("treatment", found.treatment))
    }
    shown |= {key: getattr(found, key) for key in ("difference", "low", "high", "p_value", "paired", "dropped")}
    return shown | {key: None for key in ("low", "high") if math.isinf(shown[key])}


def _print(found: Comparison) -> None:
    print_table(
        ("", "rollouts", "mean reward", "n", "failed", "without reward", "not finished"),
        [
            (name, group.name, f"{group.mean:.3f}", group.n, group.failed, group.unrated, group.unfinished)
            for name, group in (("control", found.control), ("treatment", found.treatment))
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
