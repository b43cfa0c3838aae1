"""Heat strips: one narrow cell per value, for sequences as long as the tokens of a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from agentlightning_plugins.shared.charts.svg import TEXT, no_data, number, picture, text

LEVELS: Final = 4
_HEAT: Final = ("var(--chart-heat-negative, #d9480f)", "var(--chart-heat, #2f6fed)")


def heat_level(value: float | None, largest: float) -> int:
    """Returns how strongly to colour a value: from ``-LEVELS`` to ``LEVELS``; 0 for no value or a value near 0.

    Args:
        value: the value; an infinite value gets the strongest level of its sign.
        largest: the absolute value that gets the strongest level.
    """
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

    Args:
        values: one per token; None has no colour. If they do not all fit, a cell shows the largest of several.
        title: read by screen readers; not drawn.
        boundaries: indices in ``values`` where a line is drawn, such as the first token of each call.
        largest: the absolute value with the strongest colour; None: the largest one in ``values``.
        width: width in the picture's coordinates; the picture scales with the page.
        height: height in the picture's coordinates.
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
