"""Histograms, and heat strips for sequences as long as the tokens of a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from agentlightning_plugins.shared.rendering.svg import (
    COLOURS,
    TEXT,
    Area,
    axes,
    find_ticks,
    link,
    no_data,
    number,
    picture,
    text,
)


def histogram(
    values: Sequence[float],
    *,
    title: str,
    x_label: str = "",
    bins: int = 20,
    href: Callable[[float, float], str] | None = None,
    width: int = 480,
    height: int = 200,
) -> Markup:
    """Draws a histogram of about ``bins`` ranges with round bounds; values that are not finite are skipped.

    ``href`` returns the link of a range, from its lower and upper bound.
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return no_data(width, height, title)
    is_whole = all(value == int(value) for value in finite) and max(finite) - min(finite) < 2 * bins
    if is_whole:  # a bar for each whole number
        count = int(max(finite) - min(finite)) + 1
        margin = max(0, 5 - count) // 2  # keeps few bars from being drawn as wide blocks
        edges = [min(finite) - margin - 0.5 + place for place in range(count + 2 * margin + 1)]
    else:
        edges = find_ticks(min(finite), max(finite), bins)
    counts = [0] * (len(edges) - 1)
    size = (edges[-1] - edges[0]) / len(counts)
    for value in finite:
        counts[min(len(counts) - 1, int((value - edges[0]) / size + 1e-9))] += 1
    y_ticks = [tick for tick in find_ticks(0, max(counts), 4) if tick == int(tick)]
    area = Area(46, 12, width - 14, height - (40 if x_label else 24), edges[0], edges[-1], 0, max(y_ticks[-1], *counts))
    x_ticks = [tick for tick in find_ticks(edges[0], edges[-1], width // 90) if edges[0] <= tick <= edges[-1]]
    if is_whole:
        x_ticks = [tick for tick in x_ticks if tick == int(tick) and min(finite) <= tick <= max(finite)]
    parts = axes(area, x_ticks, y_ticks, x_label, "")
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if not count:
            continue
        shown = f"{number(low + 0.5) if is_whole else f'{number(low)} to {number(high)}'}: {count}"
        left, right, top = area.x(low), area.x(high), area.y(count)
        bar = Markup('<rect x="{}" y="{}" width="{:.1f}" height="{:.1f}" fill="{}"><title>{}</title></rect>').format(
            left + 0.5, top, max(1.0, right - left - 1), area.bottom - top, COLOURS[0], text(shown)
        )
        parts.append(link(bar, href(low, high) if href else "", shown))
    return picture(parts, width, height, title, f"{len(finite)} values, {number(min(finite))} to {number(max(finite))}")


LEVELS: Final = 4
_HEAT: Final = ("var(--chart-heat-negative, #d9480f)", "var(--chart-heat, #2f6fed)")


def heat_level(value: float | None, largest: float) -> int:
    """Returns how strongly to colour a value, from ``-LEVELS`` to ``LEVELS`` for ``largest``; 0 for no value."""
    if value is None or math.isnan(value) or value == 0 or largest <= 0:
        return 0
    level = min(LEVELS, math.ceil(LEVELS * min(1.0, abs(value) / largest) - 0.25))
    return level if value > 0 else -level


def heat_strip(
    values: Sequence[float | None],
    *,
    title: str,
    boundaries: Sequence[int] = (),
    largest: float | None = None,
    width: int = 720,
    height: int = 26,
) -> Markup:
    """Draws values as coloured cells: one colour for positive and one for negative values, stronger with their size.

    If they do not all fit, a cell shows the largest of several; None has no colour. A line is drawn at each index of
    ``boundaries``, such as the first token of a call. ``largest`` is the absolute value with the strongest colour.
    """
    if not values:
        return no_data(width, height, title)
    finite = [abs(value) for value in values if value is not None and math.isfinite(value)]
    most = max(finite, default=0.0) if largest is None else largest
    cells = min(len(values), width)
    edges = [len(values) * cell // cells for cell in range(cells + 1)]
    parts = []
    for cell, (start, end) in enumerate(pairwise(edges)):
        known = [value for value in values[start:end] if value is not None and not math.isnan(value)]
        strongest = max(known, key=abs, default=None)
        if level := heat_level(strongest, most):
            shown = f"{start if end == start + 1 else f'{start} to {end - 1}'}: {number(strongest or 0.0)}"
            parts.append(
                Markup(
                    '<rect x="{:.2f}" width="{:.2f}" height="{}" fill="{}" fill-opacity="{}"><title>{}</title></rect>'
                ).format(
                    cell * width / cells, width / cells, height, _HEAT[level > 0], abs(level) / LEVELS, text(shown)
                )
            )
    for place in boundaries:
        x = width * place / len(values)
        parts.append(Markup('<path d="M{:.2f} 0V{}" stroke="{}"/>').format(x, height, TEXT))
    return picture(parts, width, height, title, f"{len(values)} values, at most {number(most)}")
