"""Charts as SVG: lines, histograms, and heat strips for sequences as long as the tokens of a rollout.

Colours are CSS variables with fall-backs, set by presentation attributes, so that a page can override them and a strict
content security policy accepts the charts: ``--chart-1`` to ``--chart-6``, ``--chart-text``, ``--chart-grid``,
``--chart-heat`` and ``--chart-heat-negative``. The functions return ``Markup``: templates do not escape it again.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup, escape

from agentlightning_plugins.shared.rendering.text import show_hidden

_COLOURS: Final = tuple(
    f"var(--chart-{number}, {colour})"
    for number, colour in enumerate(("#2f6fed", "#d9480f", "#2b8a3e", "#9c36b5", "#c07000", "#0c8599"), 1)
)
_TEXT: Final = "var(--chart-text, #7a8194)"
_GRID: Final = "var(--chart-grid, #8a90a04d)"
_HEAT: Final = ("var(--chart-heat-negative, #d9480f)", "var(--chart-heat, #2f6fed)")
_LEVELS: Final = 4
_FONT_SIZE: Final = 12
_LETTER: Final = _FONT_SIZE * 0.56
"""Mean width of a letter, in pixels."""
_MAX_NAME: Final = 30
_MAX_MARKS: Final = 200
"""Largest number of dots that are drawn for a series."""
_MAX_PLAIN: Final = 60
"""An uninterrupted line with more points than this has dots only at points with a link."""
_NOT_XML = "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
_STEPS: Final = (1, 2, 2.5, 5, 10)


class Point(NamedTuple):
    """One value; ``low`` and ``high`` bound its interval, ``href`` links to its details."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    href: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The bounds, if both are finite numbers."""
        if self.low is None or self.high is None or not math.isfinite(self.low + self.high):
            return None
        return self.low, self.high


class Series(NamedTuple):
    """The points of one line, by ascending ``x``. A value that is not finite interrupts the line."""

    name: str
    points: Sequence[Point]
    is_line: bool = True
    """Whether to draw a line through the points; if not, only dots are drawn."""
    colour: int | None = None
    """Index of the colour; None: the index of the series in the chart."""


class _Area(NamedTuple):
    """The rectangle of a chart's data, in pixels, and the range of values that it shows."""

    left: float
    top: float
    right: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        """Converts a value to a pixel; values outside the range are drawn at its edge."""
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(self.left + (self.right - self.left) * min(1.0, max(0.0, share)), 1)

    def y(self, value: float) -> float:
        """Converts a value to a pixel; values outside the range are drawn at its edge."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(self.bottom - (self.bottom - self.top) * min(1.0, max(0.0, share)), 1)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    y_range: tuple[float, ...] = (),
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
        return _no_data(width, height, title)
    values = [*y_range, *(value for point in finite for value in (point.y, *(point.interval or ())))]
    y_ticks = find_ticks(min(values), max(values))
    low, high = min(point.x for point in finite), max(point.x for point in finite)
    if low == high:
        low, high = low - 0.5, high + 0.5
    names = [_shorten(each.name, _MAX_NAME) for each in drawn]
    rows = _legend_rows(names, width - 24) if has_legend else []
    legend_height = 18 * (max(rows)[0] + 1) if rows else 0
    left = 14 + _LETTER * max(len(_number(value)) for value in y_ticks)
    bottom = height - 24 - legend_height - (16 if x_label else 0)
    area = _Area(left, 24 if y_label else 12, width - 14, bottom, low, high, y_ticks[0], y_ticks[-1])
    whole = all(point.x == int(point.x) for point in finite)
    x_ticks = [x for x in find_ticks(low, high, width // 90) if low <= x <= high and (not whole or x == int(x))]
    parts = _axes(area, x_ticks, y_ticks, x_label, y_label)
    for place, each in enumerate(drawn):
        colour = _COLOURS[(place if each.colour is None else each.colour) % len(_COLOURS)]
        parts += _draw_series(each, colour, area)
        if not rows:
            continue
        row, x = rows[place]
        y = height - legend_height + 18 * row + 10
        parts.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4.5" fill="{}"/>').format(x + 5, y - 4, colour))
        parts.append(_label(x + 14, y, names[place], "start"))
    return _picture(parts, width, height, title, "; ".join(map(_describe, drawn)))


def _draw_series(series: Series, colour: str, area: _Area) -> Iterator[Markup]:
    runs = [list(run) for is_finite, run in itertools.groupby(series.points, _is_finite) if is_finite]
    for run in runs:
        bounded = [(area.x(p.x), *map(area.y, p.interval)) for p in run if p.interval is not None]
        if series.is_line and len(bounded) > 1:
            edge = [f"{x},{high}" for x, _, high in bounded] + [f"{x},{low}" for x, low, _ in reversed(bounded)]
            yield Markup('<polygon points="{}" fill="{}" fill-opacity="0.18"/>').format(" ".join(edge), colour)
        elif bounded:
            bars = " ".join(f"M{x} {high}V{low}" for x, low, high in bounded)
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
        shown = f"{series.name}, {_number(point.x)}: {_number(point.y)}"
        if point.interval is not None:
            shown += f" ({' to '.join(map(_number, point.interval))})"
        circle = Markup('<circle cx="{}" cy="{}" r="{}" fill="{}"><title>{}</title></circle>')
        x, y, title = area.x(point.x), area.y(point.y), _text(shown, 120)
        dot = circle.format(x, y, radius, colour, title)
        if point.href:  # a larger target for the pointer
            dot += circle.format(x, y, 9, "transparent", title)
        yield _link(dot, point.href, shown)


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
    return f"{series.name}: {_number(first.y)} at {_number(first.x)}, {_number(last.y)} at {_number(last.x)}"


def _is_finite(point: Point) -> bool:
    return math.isfinite(point.y)


def histogram(
    values: Sequence[float],
    *,
    title: str,
    x_label: str = "",
    bins: int = 20,
    href: Callable[[float, float], str] = lambda low, high: "",
    width: int = 480,
    height: int = 200,
) -> Markup:
    """Draws a histogram of about ``bins`` ranges with round bounds; values that are not finite are skipped.

    ``href`` returns the link of a range, from its lower and upper bound.
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return _no_data(width, height, title)
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
    area = _Area(
        46, 12, width - 14, height - (40 if x_label else 24), edges[0], edges[-1], 0, max(y_ticks[-1], *counts)
    )
    x_ticks = [tick for tick in find_ticks(edges[0], edges[-1], width // 90) if edges[0] <= tick <= edges[-1]]
    if is_whole:
        x_ticks = [tick for tick in x_ticks if tick == int(tick) and min(finite) <= tick <= max(finite)]
    parts = _axes(area, x_ticks, y_ticks, x_label, "")
    for (low, high), count in zip(itertools.pairwise(edges), counts, strict=True):
        if not count:
            continue
        shown = f"{_number(low + 0.5) if is_whole else f'{_number(low)} to {_number(high)}'}: {count}"
        left, right, top = area.x(low), area.x(high), area.y(count)
        bar = Markup('<rect x="{}" y="{}" width="{:.1f}" height="{:.1f}" fill="{}"><title>{}</title></rect>').format(
            left + 0.5, top, max(1.0, right - left - 1), area.bottom - top, _COLOURS[0], _text(shown)
        )
        parts.append(_link(bar, href(low, high), shown))
    about = f"{len(finite)} values, {_number(min(finite))} to {_number(max(finite))}"
    return _picture(parts, width, height, title, about)


def heat_level(value: float | None, largest: float) -> int:
    """Returns how strongly to colour a value, from -4 to 4 for ``largest``; 0 for no value."""
    if value is None or math.isnan(value) or value == 0 or largest <= 0:
        return 0
    level = min(_LEVELS, math.ceil(_LEVELS * min(1.0, abs(value) / largest) - 0.25))
    return level if value > 0 else -level


def heat_strip(
    values: Sequence[float | None], *, title: str, boundaries: Sequence[int] = (), largest: float | None = None
) -> Markup:
    """Draws values as coloured cells: one colour for positive and one for negative values, stronger with their size.

    If they do not all fit, a cell shows the largest of several; None has no colour. A line is drawn at each index of
    ``boundaries``, such as the first token of a call. ``largest`` is the absolute value with the strongest colour.
    """
    width, height = 720, 26
    if not values:
        return _no_data(width, height, title)
    finite = [abs(value) for value in values if value is not None and math.isfinite(value)]
    most = max(finite, default=0.0) if largest is None else largest
    cells = min(len(values), width)
    edges = [len(values) * cell // cells for cell in range(cells + 1)]
    parts = []
    for cell, (start, end) in enumerate(itertools.pairwise(edges)):
        known = [value for value in values[start:end] if value is not None and not math.isnan(value)]
        strongest = max(known, key=abs, default=0.0)
        if level := heat_level(strongest, most):
            shown = f"{start if end == start + 1 else f'{start} to {end - 1}'}: {_number(strongest)}"
            colour, opacity = _HEAT[level > 0], abs(level) / _LEVELS
            parts.append(
                Markup(
                    '<rect x="{:.2f}" width="{:.2f}" height="{}" fill="{}" fill-opacity="{}"><title>{}</title></rect>'
                ).format(cell * width / cells, width / cells, height, colour, opacity, _text(shown))
            )
    for place in boundaries:
        x = width * place / len(values)
        parts.append(Markup('<path d="M{:.2f} 0V{}" stroke="{}"/>').format(x, height, _TEXT))
    return _picture(parts, width, height, title, f"{len(values)} values, at most {_number(most)}")


def _shorten(value: object, limit: int) -> str:
    """Shortens a text, and replaces hidden characters and those that XML does not allow."""
    found = re.sub(_NOT_XML, "\ufffd", show_hidden(str(value)[: limit + 1]))
    return found if len(found) <= limit else f"{found[: limit - 1]}…"


def _text(value: object, limit: int = 60) -> Markup:
    return escape(_shorten(value, limit))


def _number(value: float) -> str:
    """Formats a value for people: four significant digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def find_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round values from at or below ``low`` to at or above ``high``, about ``count`` of them."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal except for rounding
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    rough = (high - low) / max(1, count)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(each * scale for each in _STEPS if each * scale >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _link(content: Markup, href: str, label: str) -> Markup:
    """Puts a link around a part of a picture; without an address, returns only the part."""
    if not href:
        return content
    return Markup('<a href="{}" aria-label="{}">{}</a>').format(href, _text(label, 200), content)


def _axes(area: _Area, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> list[Markup]:
    """Returns grid lines, ticks and the labels of both axes."""
    parts = []
    for value in y_ticks:
        y = area.y(value)
        parts.append(Markup('<path d="M{} {}H{}" stroke="{}" fill="none"/>').format(area.left, y, area.right, _GRID))
        parts.append(_label(area.left - 6, y + 4, _number(value), "end"))
    parts += [_label(area.x(value), area.bottom + 17, _number(value), "middle") for value in x_ticks]
    if x_label:
        parts.append(_label((area.left + area.right) / 2, area.bottom + 33, x_label, "middle"))
    if y_label:
        parts.append(_label(area.left, area.top - 8, y_label, "start"))
    return parts


def _label(x: float, y: float, value: object, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" fill="{}">{}</text>').format(
        x, y, anchor, _TEXT, _text(value)
    )


def _picture(parts: Sequence[Markup], width: int, height: int, title: str, description: str) -> Markup:
    """Puts the parts of a chart into one SVG element; screen readers read its title and description."""
    content = Markup("\n").join(parts)
    role = "group" if "<a " in content else "img"  # the contents of an image cannot be focused
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {} {}" role="{}" aria-label="{}" '
        'font-family="system-ui, sans-serif" font-size="{}"><title>{}</title><desc>{}</desc>\n{}\n</svg>\n'
    ).format(width, height, role, _text(title, 200), _FONT_SIZE, _text(title, 200), _text(description, 1000), content)


def _no_data(width: int, height: int, title: str) -> Markup:
    return _picture([_label(width / 2, height / 2, "no data", "middle")], width, height, title, "no data")
