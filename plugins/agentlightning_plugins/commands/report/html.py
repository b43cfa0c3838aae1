"""``report.html``: the dashboard's page of a run as one self-contained file, with the first and the last evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Metrics
from agentlightning_plugins.commands.report.report import (
    CANDIDATE_COLUMNS,
    Report,
    candidate_row,
    find_published_prompts,
    read_report,
)
from agentlightning_plugins.shared.charts.png import to_png
from agentlightning_plugins.shared.monitoring.candidates import list_distributions
from agentlightning_plugins.shared.monitoring.evaluation import compare_first_and_last, read_rewards
from agentlightning_plugins.shared.monitoring.metrics import make_series
from agentlightning_plugins.shared.monitoring.result import read_result
from agentlightning_plugins.shared.rendering.charts import reward_chart
from agentlightning_plugins.shared.rendering.page import write_page
from agentlightning_plugins.shared.statistics.interval import mean_interval
from agentlightning_plugins.shared.training_records.query import count_outcomes, read_ledger
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN

HTML_NAME: Final = "report.html"
_COSTS: Final = {
    "calls": "model calls",
    "tokens": "tokens",
    "sampled_tokens": "sampled tokens",
    "cost": "cost",
}
_CONFIRMATION: Final = ("confirmed_first", "confirmed_best", "confirmed_p")
_MAX_INTERVALS: Final = 30
"""Maximum number of evaluations whose intervals are computed from their rollouts."""


async def write_html(store: LightningStore, directory: Path, file: Path | None = None) -> Path:
    """Writes the page into ``file``, or into the directory of the run.

    Raises:
        ConfigError: ``directory`` contains no run.
        OSError: the file cannot be written.
    """
    report = await read_report(store, directory)
    metrics = (await store.query_metrics()).items
    published = find_published_prompts(report)
    comparison = await compare_first_and_last(store, metrics, report.candidates, published)
    has_ledger = bool((await store.query_spans(None, name=LEDGER_SPAN, limit=1)).items)
    data = await read_result(store)
    return write_page(
        Path(__file__).with_name("report.html.jinja"),
        file or directory / HTML_NAME,
        data={**data, "reward": await _with_intervals(store, metrics, data["reward"])},
        report=report,
        comparison=comparison,
        is_published=published == {name: text for name, text, _ in comparison.prompts},
        confirmation={name: report.metrics[name]["last"] for name in _CONFIRMATION if name in report.metrics},
        candidate_columns=CANDIDATE_COLUMNS,
        candidates=[candidate_row(each) for each in report.candidates],
        distributions=list_distributions(report.candidates),
        ledger=count_outcomes(await read_ledger(store)) if has_ledger else {},
        costs=_sum_costs(metrics, report),
    )


async def write_png(store: LightningStore, file: Path) -> Path:
    """Writes the reward curve as a PNG picture.

    Raises:
        ConfigError: resvg-py is not installed.
        OSError: the file cannot be written.
    """
    metrics = (await store.query_metrics()).items
    series = await _with_intervals(store, metrics, (await read_result(store))["reward"])
    picture = to_png(reward_chart(series, width=540, height=270))
    await asyncio.to_thread(file.write_bytes, picture)
    return file


async def _with_intervals(
    store: LightningStore, metrics: Sequence[Metrics], reward: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, Sequence[Mapping[str, float]]]:
    """Adds the best score of a prompt search, and the intervals of evaluations, from the rewards of their rollouts."""
    series = {**reward, "best_score": make_series(metrics, "best_score")}
    for name in ("val_reward", "test_reward"):
        points = []
        for point in series.get(name, ()) if len(series.get(name, ())) <= _MAX_INTERVALS else ():
            rewards = await read_rewards(store, int(point["step"]), name.removesuffix("_reward"))
            low, high = mean_interval(list(rewards.values())) or (None, None)
            points.append({**point, **({} if low is None or high is None else {"low": low, "high": high})})
        series[name] = points or series.get(name, ())
    return {name: points for name, points in series.items() if points}


def _sum_costs(metrics: Sequence[Metrics], report: Report) -> list[tuple[str, float]]:
    """Sums the costs over all steps; for a prompt search, which reports totals, takes the last values."""
    found = []
    for name, label in _COSTS.items():
        values = [entry.values[name] for entry in metrics if name in entry.values]
        if values:
            found.append((label, values[-1] if report.candidates else sum(values)))
    return found
