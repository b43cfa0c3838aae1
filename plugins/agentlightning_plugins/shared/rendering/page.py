"""Pages from templates: served by the dashboard, or written to a file that loads nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentlightning_plugins.shared.rendering import text
from agentlightning_plugins.shared.rendering.charts import Point, Series, heat_strip, histogram, line_chart

_NAMES: Final = {
    "reward": "reward",
    "train_reward": "training reward",
    "val_reward": "validation reward",
    "test_reward": "test reward",
    "best_score": "best prompt",
}
_MODES: Final = {"train_reward": "train", "val_reward": "val", "test_reward": "test"}


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
        target = f"{base}/rollouts?{f'mode={_MODES[name]}&' if name in _MODES else ''}step="
        if has_ledger and name not in _MODES:
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
    target = f"/runs/{quote(run_id, safe='')}/rollouts?mode=train&step={step}"
    return histogram(
        [rollout[key] for rollout in rollouts if rollout[key] is not None],
        title=f"{x_label} of the rollouts of step {step}",
        x_label=x_label,
        bins=12,
        href=lambda low, high: f"{target}&min={low:g}&max={high:g}" if key == "reward" else "",
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


_PACKAGE: Final = "agentlightning_plugins.shared.rendering"


def make_environment(*loaders: BaseLoader) -> Environment:
    """Returns an environment that escapes values, shortens long texts and shows hidden characters.

    Its templates come from ``loaders`` and from this package: ``parts`` and ``result``, and the layout ``file``.
    """
    environment = Environment(
        loader=ChoiceLoader([*loaders, PackageLoader(_PACKAGE)]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=text.finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "line": text.show_line,
        "short": lambda value: text.show_text(value, 2_000),
        "dump": text.dump,
        "task": lambda value: text.show_task(value, "\n"),
        "number": text.show_number,
        "span": text.show_span,
        "instant": text.show_time,
        "ago": text.show_ago,
        "part": lambda value: quote(str(value), safe=""),
    }
    charts = heat_strip, reward_chart, metric_chart, ledger_histogram, compare_chart, distribution_histogram
    environment.globals |= {each.__name__: each for each in (link, *charts)}
    for name in ("parts", "result"):
        environment.globals[name] = environment.get_template(f"{name}.html.jinja").module
    return environment


def link(path: str, query: dict[str, Any] | None = None, **changes: Any) -> str:
    """Returns a path with a query, which omits parameters that are None or empty."""
    merged = {name: value for name, value in {**(query or {}), **changes}.items() if value not in (None, "")}
    return f"{path}?{urlencode(merged)}" if merged else path


def read_style() -> str:
    """Returns the style sheet of all pages."""
    return (files(_PACKAGE) / "dashboard.css").read_text(encoding="utf-8")


def write_page(template: Path, file: Path, **values: Any) -> Path:
    """Writes a page, from a template that extends ``file.html.jinja``, to a file; raises OSError."""
    page = make_environment().from_string(template.read_text(encoding="utf-8"))
    html = page.render(style=read_style(), **values)
    file.write_text(html, encoding="utf-8", errors="replace")
    return file
