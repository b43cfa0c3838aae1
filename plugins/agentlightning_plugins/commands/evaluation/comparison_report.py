"""The result of ``agl compare``: a row for each algorithm or prompt, the table on the terminal, and ``report.html``."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from agentlightning.cli import echo
from agentlightning.errors import NotFoundError
from agentlightning_plugins.commands.evaluation.variant import Variant
from agentlightning_plugins.shared.rendering.charts import Point, Series, line_chart
from agentlightning_plugins.shared.rendering.page import write_page
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.statistics.comparison import Difference, difference_over_seeds, interval_over_seeds
from agentlightning_plugins.shared.statistics.interval import adjust_p_values
from agentlightning_plugins.shared.statistics.score import FAILED, count_failed_alike

_SIGNIFICANT: Final = 0.05
"""A p-value below this counts for ``--fail-if-worse``."""
PAGE_NAME: Final = "report.html"
_COLUMNS: Final = (
    *("", "reward", "95 % interval", "difference", "95 % interval", "p"),
    *("missing", "rollouts", "seconds"),
)
_ONE_SEED: Final = "one seed: intervals and p-values do not cover the variation between trainings; use --seeds"
_ADJUSTED: Final = "p-values are adjusted for several comparisons (Holm); intervals are not"
_FAILED: Final = f"{FAILED}; rollouts without a reward (missing) are excluded"


def compare_variants(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Returns a row for each variant with its difference to the first, None if no task has rewards of both."""
    alike = iter(count_failed_alike([score for variant in variants for score in variant.scores]))
    variants = [replace(variant, scores=[next(alike) for _ in variant.scores]) for variant in variants]
    first, *others = variants
    differences = [None, *(_difference(variant, first) for variant in others)]
    p_values = iter(adjust_p_values([found.p_value for found in differences if found is not None]))
    rows: list[dict[str, Any]] = []
    for variant, found in zip(variants, differences, strict=True):
        score = variant.pooled()
        low, high = interval_over_seeds(score, variant.by_task()) or (None, None)
        is_open = found is None or math.isinf(found.low)
        rows.append(
            {
                "label": variant.label,
                "reward": score.mean,
                "low": low,
                "high": high,
                "difference": found and found.mean,
                "difference_low": None if found is None or is_open else found.low,
                "difference_high": None if found is None or is_open else found.high,
                "p": None if found is None else next(p_values),
                "missing": score.missing,
                "rollouts": statistics.fmean(variant.rollouts),
                "seconds": statistics.fmean(variant.seconds),
                "prompts": variant.prompts,
            }
        )
    return rows


def _difference(variant: Variant, first: Variant) -> Difference | None:
    try:
        return difference_over_seeds(variant.by_task(), first.by_task())
    except NotFoundError:  # the other rows are still valid
        return None


def check_regression(rows: Sequence[dict[str, Any]]) -> None:
    """Raises ClickException if a row is significantly worse than the first, or cannot be compared with it."""
    for row in rows[1:]:
        label = row["label"]
        if row["difference"] is None:
            raise click.ClickException(f"{label} cannot be compared: no test task has rewards of both it and the first")
        if row["difference"] < 0 and row["p"] < _SIGNIFICANT:
            raise click.ClickException(f"{label} is worse by {-row['difference']:.3f}, p = {row['p']:.2g}")


def print_comparison(variants: Sequence[Variant], rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows as a table, followed by notes that explain its numbers."""
    print_table(_COLUMNS, _to_table(rows))
    echo()
    for note in _notes(variants):
        echo(note)


def _notes(variants: Sequence[Variant]) -> list[str]:
    """Returns the lines below the table, which explain its numbers."""
    has_one_seed = any(len(variant.stages) > 0 and len(variant.scores) == 1 for variant in variants)
    return [_FAILED, *([_ADJUSTED] if len(variants) > 2 else []), *([_ONE_SEED] if has_one_seed else [])]


def write_comparison(variants: Sequence[Variant], rows: Sequence[dict[str, Any]], directory: Path) -> Path:
    """Writes the report of the comparison, which links to the reports of its runs."""
    return write_page(
        Path(__file__).with_name("report.html.jinja"),
        directory / PAGE_NAME,
        columns=_COLUMNS,
        rows=_to_table(rows),
        notes=_notes(variants),
        n_tasks=len(variants[0].scores[0].rewards),
        chart=line_chart(
            [
                Series(row["label"], [Point(place, row["reward"], row["low"], row["high"])], is_line=False)
                for place, row in enumerate(rows, start=1)
            ],
            title="Mean reward on the test tasks, with 95 % intervals",
            x_label="row of the table",
            y_label="reward",
            width=540,
        ),
        results=[
            (variant.label, list(zip(variant.prompts, _links(variant, directory), strict=True))) for variant in variants
        ],
    )


def _links(variant: Variant, directory: Path) -> list[list[str]]:
    """Returns the paths of the run reports of each seed, relative to the directory."""
    return [
        [Path(os.path.relpath(page, directory)).as_posix() for page in sorted(place.rglob(PAGE_NAME))]
        for place in variant.places
    ]


def _to_table(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            row["label"],
            f"{row['reward']:.3f}",
            "none" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
            *_difference_cells(row, place == 0),
            str(row["missing"]),
            f"{row['rollouts']:.0f}",
            f"{row['seconds']:.1f}",
        )
        for place, row in enumerate(rows)
    ]


def _difference_cells(row: dict[str, Any], is_first: bool) -> tuple[str, str, str]:
    """Returns the difference to the first row, its interval and its p-value."""
    low, high, p = row["difference_low"], row["difference_high"], row["p"]
    if p is None:
        absent = "" if is_first else "none"
        return absent, absent, absent
    interval = "none" if low is None else f"{low:+.3f} to {high:+.3f}"
    return f"{row['difference']:+.3f}", interval, f"{p:.3f}" if p >= 0.001 else "<0.001"
