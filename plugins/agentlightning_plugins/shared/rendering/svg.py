"""Parts of every chart, as SVG: the picture's frame, axes with ticks, escaped text and links.

Colours are CSS variables with fall-backs, set by presentation attributes, so that a page can override them and a strict
content security policy accepts the charts: ``--chart-1`` to ``--chart-6``, ``--chart-text``, ``--chart-grid``,
``--chart-heat`` and ``--chart-heat-negative``. The functions return ``Markup``: templates do not escape it again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from markupsafe import Markup, escape

COLOURS: Final = tuple(
    f"var(--chart-{number}, {colour})"
    for number, colour in enumerate(("#2f6fed", "#d9480f", "#2b8a3e", "#9c36b5", "#c07000", "#0c8599"), 1)
)
TEXT: Final = "var(--chart-text, #7a8194)"
GRID: Final = "var(--chart-grid, #8a90a04d)"
FONT_SIZE: Final = 12
_MAX_TEXT: Final = 60
_NOT_XML = "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
_STEPS: Final = (1, 2, 2.5, 5, 10)


class Area(NamedTuple):
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


def shorten(value: object, limit: int = _MAX_TEXT) -> str:
    """Shortens a text, and replaces hidden characters and those that XML does not allow."""
    found = re.sub(_NOT_XML, "\ufffd", show_hidden(str(value)[: limit + 1]))
    return found if len(found) <= limit else f"{found[: limit - 1]}…"


def text(value: object, limit: int = _MAX_TEXT) -> Markup:
    """Shortens and escapes a text."""
    return escape(shorten(value, limit))


def number(value: float) -> str:
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


def link(content: Markup, href: str, label: str) -> Markup:
    """Puts a link around a part of a picture; without an address the part stays as it is."""
    if not href:
        return content
    return Markup('<a href="{}" aria-label="{}">{}</a>').format(href, text(label, 200), content)


def axes(area: Area, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> list[Markup]:
    """Returns grid lines, ticks and the labels of both axes."""
    parts = []
    for value in y_ticks:
        y = area.y(value)
        parts.append(
            Markup('<path d="M{} {}H{}" stroke="{}" fill="none"/>').format(area.left, y, area.right, GRID)
            + label(area.left - 6, y + 4, number(value), "end")
        )
    parts += [label(area.x(value), area.bottom + 17, number(value), "middle") for value in x_ticks]
    if x_label:
        parts.append(label((area.left + area.right) / 2, area.bottom + 33, x_label, "middle"))
    if y_label:
        parts.append(label(area.left, area.top - 8, y_label, "start"))
    return parts


def label(x: float, y: float, value: object, anchor: str, colour: str = TEXT) -> Markup:
    """Returns a short text."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" fill="{}">{}</text>').format(
        x, y, anchor, colour, text(value)
    )


def picture(parts: Sequence[Markup], width: int, height: int, title: str, description: str) -> Markup:
    """Puts the parts of a chart into one SVG element; screen readers read its title and description."""
    content = Markup("\n").join(parts)
    role = "group" if "<a " in content else "img"  # the contents of an image cannot be focused
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {} {}" role="{}" aria-label="{}" '
        'font-family="system-ui, sans-serif" font-size="{}"><title>{}</title><desc>{}</desc>\n{}\n</svg>\n'
    ).format(width, height, role, text(title, 200), FONT_SIZE, text(title, 200), text(description, 1000), content)


def no_data(width: int, height: int, title: str) -> Markup:
    """Returns the chart that is shown if there are no values."""
    return picture([label(width / 2, height / 2, "no data", "middle")], width, height, title, "no data")


_HIDDEN: Final = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def show_hidden(text: str) -> str:
    """Replaces each hidden character with its code point, such as ⟨202E⟩."""
    return re.sub(_HIDDEN, lambda match: f"⟨{ord(match[0]):04X}⟩", text)
