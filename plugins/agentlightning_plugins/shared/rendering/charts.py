"""Draws the charts of the pages from plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from markupsafe import Markup

from agentlightning_plugins.shared.charts.histogram import histogram
from agentlightning_plugins.shared.charts.line import Point, Series, line_chart

_NAMES: Final = {
    "reward": "training reward",
    "train_reward": "training reward",
    "val_reward": "validation reward",
    "test_reward": "test reward",
    "best_score": "best prompt",
}
_MODES: Final = {"val_reward": "val", "test_reward": "test"}


def reward_chart(
    series: Mapping[str, Sequence[Mapping[str, float]]],
    run_id: str | None = None,
    has_ledger: bool = False,
    *,
    width: int = 760,
    height: int = 300,
) -> Markup:
    """Draws the rewards by step; with a run, each point links to the ledger of its step, else to its rollouts."""
    drawn = []
    base = f"/runs/{quote(run_id or '', safe='')}"
    for name, points in series.items():
        target = f"{base}/rollouts?mode={_MODES.get(name, 'train')}&step="
        if has_ledger and name not in _MODES:  # the step in the metadata of rollouts is one less
            target = f"{base}/ledger?step="
        marks = [_point(point, f"{target}{point['step']:.0f}" if run_id else "") for point in points]
        drawn.append(Series(_NAMES.get(name, name), marks, is_line=name != "test_reward"))
    return line_chart(drawn, title="Reward by step", x_label="step", width=width, height=height)


def metric_chart(name: str, points: Sequence[Mapping[str, float]]) -> Markup:
    """Draws one metric by step."""
    return line_chart(
        [Series(name, [_point(point) for point in points])],
        title=f"{name} by step",
        x_label="step",
        has_legend=False,
        height=190,
        width=420,
    )


def ledger_histogram(rollouts: Sequence[Mapping[str, Any]], key: str, x_label: str, run_id: str, step: int) -> Markup:
    """Draws how often the rollouts of a training step have each value; a bar of rewards links to its rollouts."""
    target = f"/runs/{quote(run_id, safe='')}/rollouts?mode=train&step={step - 1}"
    return histogram(
        [rollout[key] for rollout in rollouts if rollout[key] is not None],
        title=f"{x_label} of the rollouts of step {step}",
        x_label=x_label,
        bins=12,
        href=(lambda low, high: f"{target}&min={low:g}&max={high:g}") if key == "reward" else None,
        width=360,
        height=180,
    )


def distribution_histogram(distribution: Mapping[str, Any]) -> Markup:
    """Draws how often each value occurs in a distribution of a prompt search."""
    name = str(distribution["name"])
    return histogram(distribution["values"], title=name.capitalize(), x_label="reward", bins=12, width=360, height=180)


def _point(point: Mapping[str, Any], href: str = "") -> Point:
    return Point(point["step"], point["value"], point.get("low"), point.get("high"), href)


def compare_chart(runs: Sequence[Mapping[str, Any]], name: str, title: str, *, width: int = 560) -> Markup:
    """Draws one metric of several runs."""
    drawn = [Series(run["name"], [_point(point) for point in run["curves"][name]]) for run in runs]
    return line_chart(drawn, title=title, x_label="step", width=width, height=280)
