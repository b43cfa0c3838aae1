"""The result of ``agl compare``: a row for each algorithm, the table on the terminal, and ``report.html``."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agentlightning.cli import echo
from agentlightning.errors import NotFoundError
from agentlightning_plugins.charts.hidden import show_hidden
from agentlightning_plugins.charts.line import Point, Series, line_chart
from agentlightning_plugins.commands.evaluation.variant import Variant
from agentlightning_plugins.commands.terminal import print_table
from agentlightning_plugins.statistics.difference import Difference, difference_over_seeds, interval_over_seeds
from agentlightning_plugins.statistics.significance import adjust_p_values

PAGE_NAME: Final = "report.html"
_COLUMNS: Final = (
    *("algorithm", "reward", "95 % interval", "difference", "95 % interval", "p"),
    *("missing", "rollouts", "seconds"),
)
_ONE_SEED: Final = "one seed: intervals and p-values do not cover the variation between trainings; use --seeds"
ADJUSTED: Final = "p-values are adjusted for several comparisons (Holm); intervals are not"
_FAILED: Final = "failed rollouts count as 0; rollouts without a reward (missing) are excluded"


def compare_variants(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Returns a row for each variant with its difference to the first, None if no task has rewards of both."""
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
                "algorithm": variant.label,
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


def print_comparison(rows: Sequence[dict[str, Any]], n_seeds: int) -> None:
    """Prints the rows as a table, followed by notes that explain its numbers."""
    print_table(_COLUMNS, _to_table(rows))
    echo()
    for note in _notes(rows, n_seeds):
        echo(note)


def _notes(rows: Sequence[dict[str, Any]], n_seeds: int) -> list[str]:
    """Returns the lines below the table, which explain its numbers."""
    return [_FAILED, *([ADJUSTED] if len(rows) > 2 else []), *([_ONE_SEED] if n_seeds == 1 else [])]


def write_page(
    variants: Sequence[Variant], rows: Sequence[dict[str, Any]], seeds: Sequence[int], directory: Path
) -> Path:
    """Writes the report of the comparison, which links to the reports of its runs.

    Raises:
        OSError: the file cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = lambda value: show_hidden(str(value))
    template = environment.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))
    page = template.render(
        columns=_COLUMNS,
        rows=_to_table(rows),
        notes=_notes(rows, len(seeds)),
        n_tasks=len(variants[0].scores[0].rewards),
        chart=line_chart(
            [
                Series(row["algorithm"], [Point(place, row["reward"], row["low"], row["high"])], is_line=False)
                for place, row in enumerate(rows, start=1)
            ],
            title="Mean reward on the test tasks, with 95 % intervals",
            x_label="row of the table",
            y_label="reward",
            width=540,
        ),
        results=[
            (variant.label, list(zip(seeds, variant.prompts, _links(variant, directory), strict=True)))
            for variant in variants
        ],
    )
    file = directory / PAGE_NAME
    file.write_text(page, encoding="utf-8", errors="replace")
    return file


def _links(variant: Variant, directory: Path) -> list[list[str]]:
    """Returns the paths of the run reports of each seed, relative to the directory."""
    return [
        [Path(os.path.relpath(page, directory)).as_posix() for page in sorted(place.rglob(PAGE_NAME))]
        for place in variant.places
    ]


def _to_table(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [_to_cells(row, "none" if place else "") for place, row in enumerate(rows)]


def _to_cells(row: dict[str, Any], absent: str) -> tuple[str, ...]:
    """Returns the cells of a row; ``absent`` replaces a missing difference."""
    has_difference = row["difference"] is not None
    return (
        row["algorithm"],
        f"{row['reward']:.3f}",
        "none" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
        f"{row['difference']:+.3f}" if has_difference else absent,
        _show_interval(row) if has_difference else absent,
        absent if not has_difference else f"{row['p']:.3f}" if row["p"] >= 0.001 else "<0.001",
        str(row["missing"]),
        f"{row['rollouts']:.0f}",
        f"{row['seconds']:.1f}",
    )


def _show_interval(row: dict[str, Any]) -> str:
    return "none" if row["difference_low"] is None else f"{row['difference_low']:+.3f} to {row['difference_high']:+.3f}"
