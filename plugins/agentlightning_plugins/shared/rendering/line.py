"""Line charts: several series over one axis, with intervals and points that carry links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from agentlightning_plugins.shared.rendering.svg import (
    COLOURS,
    FONT_SIZE,
    Area,
    axes,
    find_ticks,
    label,
    link,
    no_data,
    number,
    picture,
    shorten,
    text,
)

_MAX_MARKS: Final = 200
"""Largest number of dots that are drawn for a series."""
_MAX_PLAIN: Final = 60
"""An uninterrupted line with more points than this has dots only at points with a link."""
_LETTER: Final = FONT_SIZE * 0.56
"""Mean width of a letter, in pixels."""
_MAX_NAME: Final = 30


class Point(NamedTuple):
    """One value; ``low`` and ``high`` bound its interval, ``href`` links to its details."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    href: str = ""


class Series(NamedTuple):
    """The points of one line, by ascending ``x``. A value that is not finite interrupts the line."""

    name: str
    points: Sequence[Point]
    is_line: bool = True
    """Whether to draw a line through the points; if not, only dots are drawn."""
    colour: int | None = None
    """Index of the colour; None: the index of the series in the chart."""


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    y_range: tuple[float, float] | None = None,
    has_legend: bool = True,
    width: int = 480,
    height: int = 260,
) -> Markup:
    """Draws series over one pair of axes.

    Points with an interval get a band, or a bar where the series has no line. Screen readers read the title; it is not
    drawn. The axis shows at least ``y_range``. The picture scales with the page.
    """
    drawn = [each._replace(points=[point for point in each.points if math.isfinite(point.x)]) for each in series]
    drawn = [each for each in drawn if any(map(_is_finite, each.points))]
    finite = [point for each in drawn for point in each.points if _is_finite(point)]
    if not finite:
        return no_data(width, height, title)
    values = [value for point in finite for value in (point.y, point.low, point.high) if _is_number(value)]
    y_ticks = find_ticks(min([*values, *(y_range or ())]), max([*values, *(y_range or ())]))
    low, high = min(point.x for point in finite), max(point.x for point in finite)
    if low == high:
        low, high = low - 0.5, high + 0.5
    names = [shorten(each.name, _MAX_NAME) for each in drawn]
    rows = _legend_rows(names, width - 24) if has_legend else []
    legend_height = 18 * (max(rows)[0] + 1) if rows else 0
    left = 14 + _LETTER * max(len(number(value)) for value in y_ticks)
    bottom = height - 24 - legend_height - (16 if x_label else 0)
    area = Area(left, 24 if y_label else 12, width - 14, bottom, low, high, y_ticks[0], y_ticks[-1])
    whole = all(point.x == int(point.x) for point in finite)
    x_ticks = [x for x in find_ticks(low, high, width // 90) if low <= x <= high and (not whole or x == int(x))]
    parts = axes(area, x_ticks, y_ticks, x_label, y_label)
    for place, each in enumerate(drawn):
        colour = COLOURS[(place if each.colour is None else each.colour) % len(COLOURS)]
        parts += _draw_series(each, colour, area)
        if not rows:
            continue
        row, x = rows[place]
        y = height - legend_height + 18 * row + 10
        parts.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4.5" fill="{}"/>').format(x + 5, y - 4, colour))
        parts.append(label(x + 14, y, names[place], "start"))
    return picture(parts, width, height, title, "; ".join(map(_describe, drawn)))


def _draw_series(series: Series, colour: str, area: Area) -> Iterator[Markup]:
    runs = list(_split(series.points))
    for run in runs:
        bounded = [point for point in run if _is_number(point.low) and _is_number(point.high)]
        if series.is_line and len(bounded) > 1:
            edge = [f"{area.x(p.x)},{area.y(p.high or 0.0)}" for p in bounded]
            edge += [f"{area.x(p.x)},{area.y(p.low or 0.0)}" for p in reversed(bounded)]
            yield Markup('<polygon points="{}" fill="{}" fill-opacity="0.18"/>').format(" ".join(edge), colour)
        elif bounded:
            bars = " ".join(f"M{area.x(p.x)} {area.y(p.high or 0.0)}V{area.y(p.low or 0.0)}" for p in bounded)
            yield Markup('<path d="{}" stroke="{}" stroke-opacity="0.5" stroke-width="3"/>').format(bars, colour)
        if series.is_line and len(run) > 1:
            line = " ".join(f"{area.x(point.x)},{area.y(point.y)}" for point in run)
            yield Markup(
                '<polyline points="{}" fill="none" stroke="{}" stroke-width="2" stroke-linejoin="round"/>'
            ).format(line, colour)
    points = [point for run in runs for point in run]
    if series.is_line and len(points) > _MAX_PLAIN:
        points = [point for point in points if point.href or len(runs) > 1]
    stride = max(1, math.ceil(len(points) / _MAX_MARKS))
    radius = 2.5 if series.is_line and len(points) > 30 else 3.5
    for point in points[::-1][::stride][::-1]:  # always includes the last one
        yield _draw_mark(series.name, point, colour, area, radius)


def _draw_mark(name: str, point: Point, colour: str, area: Area, radius: float) -> Markup:
    shown = f"{name}, {number(point.x)}: {number(point.y)}"
    if _is_number(point.low) and _is_number(point.high):
        shown += f" ({number(point.low or 0.0)} to {number(point.high or 0.0)})"
    x, y = area.x(point.x), area.y(point.y)
    dot = Markup('<circle cx="{}" cy="{}" r="{}" fill="{}"><title>{}</title></circle>').format(
        x, y, radius, colour, text(shown, 120)
    )
    if point.href:  # a larger target for the pointer
        dot += Markup('<circle cx="{}" cy="{}" r="9" fill="transparent"><title>{}</title></circle>').format(
            x, y, text(shown, 120)
        )
    return link(dot, point.href, shown)


def _split(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yields the runs of points between values that are not finite."""
    run: list[Point] = []
    for point in points:
        if _is_finite(point):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _legend_rows(names: Sequence[str], width: float) -> list[tuple[int, float]]:
    """Returns row and left edge of each name of the legend."""
    places: list[tuple[int, float]] = []
    row, x = 0, 12.0
    for name in names:
        wide = 30 + _LETTER * len(name)
        if x > 12.0 and x + wide > width + 12:
            row, x = row + 1, 12.0
        places.append((row, x))
        x += wide
    return places


def _describe(series: Series) -> str:
    points = [point for point in series.points if _is_finite(point)]
    first, last = points[0], points[-1]
    return f"{series.name}: {number(first.y)} at {number(first.x)}, {number(last.y)} at {number(last.x)}"


def _is_finite(point: Point) -> bool:
    return math.isfinite(point.y)


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
