"""The charts of the pages, made of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from markupsafe import Markup

from agentlightning_plugins.charts.line import Point, Series, line_chart

_NAMES: Final = {
    "reward": "training reward",
    "train_reward": "training reward",
    "val_reward": "validation reward",
    "test_reward": "test reward",
}
_MODES: Final = {"val_reward": "val", "test_reward": "test"}


def reward_chart(series: Mapping[str, Sequence[Mapping[str, float]]], run_id: str, has_ledger: bool = False) -> Markup:
    """Draws the rewards by step; each point leads to the rollouts of its step, by the ledger where there is one."""
    drawn = []
    base = f"/runs/{quote(run_id, safe='')}"
    for name, points in series.items():
        target = f"{base}/rollouts?mode={_MODES.get(name, 'train')}&step="
        if has_ledger and name not in _MODES:  # its rollouts carry the step that they were sampled in, one less
            target = f"{base}/ledger?step="
        drawn.append(
            Series(_NAMES.get(name, name), [_point(point, f"{target}{point['step']:.0f}") for point in points])
        )
    return line_chart(drawn, title="Reward by step", x_label="step", width=760, height=300)


def metric_chart(name: str, points: Sequence[Mapping[str, float]]) -> Markup:
    """Draws one metric by step."""
    return line_chart(
        [Series(name, [_point(point) for point in points])], title=f"{name} by step", height=190, width=420
    )


def _point(point: Mapping[str, Any], href: str = "") -> Point:
    return Point(point["step"], point["value"], point.get("low"), point.get("high"), href)


def compare_chart(runs: Sequence[Mapping[str, Any]], name: str, title: str) -> Markup:
    """Draws one metric of several runs."""
    drawn = [Series(run["name"], [_point(point) for point in run["curves"][name]]) for run in runs]
    return line_chart(drawn, title=title, x_label="step", width=560, height=280)
