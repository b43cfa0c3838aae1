"""Histograms: how often values fall into each of several equal ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from agentlightning_plugins.shared.charts.svg import (
    COLOURS,
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
    """Draws a histogram; values that are not finite are skipped.

    Args:
        values: what to count.
        title: read by screen readers; not drawn.
        x_label: written below the axis.
        bins: approximate number of ranges; their bounds are round numbers.
        href: returns the link of a range, from its lower and upper bound.
        width: width in the picture's coordinates; the picture scales with the page.
        height: height in the picture's coordinates.
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
