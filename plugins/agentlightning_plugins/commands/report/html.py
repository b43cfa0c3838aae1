"""``report.html``: the report of a run as one self-contained page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Metrics
from agentlightning_plugins.charts.hidden import show_hidden
from agentlightning_plugins.charts.histogram import histogram
from agentlightning_plugins.charts.line import Point, Series, line_chart
from agentlightning_plugins.charts.png import to_png
from agentlightning_plugins.commands.report.comparison import compare_first_and_last, read_rewards
from agentlightning_plugins.commands.report.report import Report, find_published_prompts, read_report
from agentlightning_plugins.monitoring.candidates import list_distributions
from agentlightning_plugins.monitoring.metrics import make_series, sum_phases
from agentlightning_plugins.statistics.interval import mean_interval
from agentlightning_plugins.training_records.query import count_outcomes, read_ledger
from agentlightning_plugins.training_records.record import LEDGER_SPAN

HTML_NAME: Final = "report.html"
_REWARDS: Final = {
    "reward": "training",
    "val_reward": "validation",
    "test_reward": "test",
    "best_score": "best prompt",
}
_OTHERS: Final = (
    ("entropy", "Entropy", "nats per token"),
    ("logprob_gap_max", "Log-probability gap", "largest, between sampler and trainer"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("clip_fraction", "Clipped tokens", "share"),
    ("groups_without_spread", "Groups without spread", "share"),
    ("responses_cut_off", "Replies cut off", "share"),
    ("response_length", "Reply length", "tokens"),
    ("calls_per_rollout", "Calls per rollout", "mean"),
)
_COSTS: Final = {
    "calls": "model calls",
    "tokens": "tokens",
    "sampled_tokens": "sampled tokens",
    "cost": "cost",
}
_CONFIRMATION: Final = ("confirmed_first", "confirmed_best", "confirmed_p")
_MAX_INTERVALS: Final = 30
"""Maximum number of evaluations whose intervals are computed from their rollouts."""
_MAX_TEXT: Final = 20_000


async def write_html(store: LightningStore, directory: Path, file: Path | None = None) -> Path:
    """Writes the page into ``file``, or into the directory of the run.

    Raises:
        ConfigError: ``directory`` contains no run.
        OSError: the file cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    report = await read_report(store, directory)
    metrics = (await store.query_metrics()).items
    published = find_published_prompts(report)
    comparison = await compare_first_and_last(store, metrics, report.candidates, published)
    has_ledger = bool((await store.query_spans(None, name=LEDGER_SPAN, limit=1)).items)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    template = environment.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))
    page = template.render(
        report=report,
        algorithm=_name(report.run.config.get("algorithm", "")),
        rewards=await _draw_rewards(store, metrics),
        charts=[
            (title, unit, _draw(metrics, name, title))
            for name, title, unit in _OTHERS
            if sum(name in entry.values for entry in metrics) > 1
        ],
        distributions=[
            (each["name"], histogram(each["values"], title=each["name"], x_label="reward", bins=12, width=360))
            for each in list_distributions(report.candidates)
        ],
        comparison=comparison,
        prompts=comparison.prompts,
        is_published=published == {name: text for name, text, _ in comparison.prompts},
        confirmation={name: report.metrics[name]["last"] for name in _CONFIRMATION if name in report.metrics},
        ledger=count_outcomes(await read_ledger(store)) if has_ledger else {},
        phases=sum_phases(metrics),
        costs=_sum_costs(metrics, report),
    )
    file = file or directory / HTML_NAME
    file.write_text(page, encoding="utf-8", errors="replace")
    return file


async def write_png(store: LightningStore, file: Path) -> Path:
    """Writes the reward curve as a PNG picture.

    Raises:
        ConfigError: resvg-py is not installed.
        OSError: the file cannot be written.
    """
    picture = to_png(await _draw_rewards(store, (await store.query_metrics()).items))
    await asyncio.to_thread(file.write_bytes, picture)
    return file


def visible(value: object) -> str:
    """Converts to text that shows control characters, direction marks and characters without width."""
    text = str(value)
    cut = f"\n... {len(text) - _MAX_TEXT:,} more characters" if len(text) > _MAX_TEXT else ""
    return show_hidden(text[:_MAX_TEXT]) + cut


async def _draw_rewards(store: LightningStore, metrics: Sequence[Metrics]) -> Any:
    series = []
    for name, label in _REWARDS.items():
        points = [
            Point(each["step"], each["value"], each.get("low"), each.get("high")) for each in make_series(metrics, name)
        ]
        if name in ("val_reward", "test_reward") and len(points) <= _MAX_INTERVALS:
            for place, point in enumerate(points):
                rewards = await read_rewards(store, int(point.x), name.removesuffix("_reward"))
                low, high = mean_interval(list(rewards.values())) or (None, None)
                points[place] = point._replace(low=low, high=high)
        if points:
            series.append(Series(label, points, is_line=name != "test_reward"))
    return line_chart(series, title="Mean reward by step, with 95 % intervals", x_label="step", width=540, height=270)


def _draw(metrics: Sequence[Metrics], name: str, title: str) -> Any:
    points = [Point(entry.step, entry.values[name]) for entry in metrics if name in entry.values]
    return line_chart([Series(name, points)], title=f"{title} by step", x_label="step", width=360, height=220)


def _sum_costs(metrics: Sequence[Metrics], report: Report) -> list[tuple[str, float]]:
    """Sums the costs over all steps; for a prompt search, which reports totals, takes the last values."""
    found = []
    for name, label in _COSTS.items():
        values = [entry.values[name] for entry in metrics if name in entry.values]
        if values:
            found.append((label, values[-1] if report.candidates else sum(values)))
    return found


def _name(algorithm: Any) -> str:
    return str(algorithm["name"] if isinstance(algorithm, Mapping) else algorithm)
