"""Charts: SVG that is well formed, escaped and readable for any values."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from xml.etree.ElementTree import Element

import pytest
from markupsafe import Markup

from agentlightning_plugins.shared.rendering.charts import (
    Point,
    Series,
    find_ticks,
    heat_level,
    heat_strip,
    histogram,
    line_chart,
)

HOSTILE = "</title><script>alert(1)</script>\x1b[31m\0\"'&\u202e\ud800{0}%s"
SVG = "{http://www.w3.org/2000/svg}"


def _parse(chart: Markup) -> Element:
    return ET.fromstring(chart.encode("utf-8"))


def _count(chart: Markup, tag: str) -> int:
    return len(list(_parse(chart).iter(SVG + tag)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: line_chart([Series(HOSTILE, [Point(0, 1), Point(1, 2)])], title=HOSTILE, x_label=HOSTILE),
        lambda: histogram([1.0, 2.0], title=HOSTILE, x_label=HOSTILE, href=lambda low, high: '/?a="&b'),
        lambda: heat_strip([1.0], title=HOSTILE),
    ],
)
def test_hostile_names_are_shown_as_text_in_well_formed_svg(draw: Callable[[], Markup]) -> None:
    picture = draw()
    tree = _parse(picture)
    assert _count(picture, "script") == 0
    title = tree.find(SVG + "title")
    assert title is not None
    assert title.text is not None
    assert "<script>" in title.text
    assert tree.get("role") in ("img", "group")
    assert tree.get("aria-label")


def test_a_point_links_to_the_given_address() -> None:
    chart = line_chart([Series("a", [Point(0, 1, href="/runs/r?step=0&x=1"), Point(1, 2)])], title="t")
    links = list(_parse(chart).iter(SVG + "a"))
    assert [link.get("href") for link in links] == ["/runs/r?step=0&x=1"]
    assert links[0].get("aria-label") == "a, 0: 1"
    assert _parse(chart).get("role") == "group"


def test_a_value_that_is_not_finite_interrupts_the_line() -> None:
    values = [1.0, 2.0, math.nan, 3.0, 4.0, math.inf, 5.0]
    chart = line_chart([Series("a", [Point(x, y) for x, y in enumerate(values)])], title="t")
    assert _count(chart, "polyline") == 2
    assert "nan" not in chart
    assert "inf" not in chart


def test_an_interval_is_drawn_as_a_band_around_a_line_but_not_around_dots() -> None:
    points = [Point(0, 1, 0.5, 1.5), Point(1, 2, 1.5, 2.5)]
    assert _count(line_chart([Series("a", points)], title="t"), "polygon") == 1
    assert _count(line_chart([Series("a", points, is_line=False)], title="t"), "polygon") == 0


@pytest.mark.parametrize("values", [[], [math.nan]])
def test_a_chart_without_values_shows_no_data(values: list[float]) -> None:
    points = [Point(x, y) for x, y in enumerate(values)]
    assert "no data" in line_chart([Series("a", points)], title="t")
    assert "no data" in histogram(values, title="t")
    assert "no data" in heat_strip([], title="t")


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *[(0, 1), (0.13, 0.87), (-3, 1e6), (5, 5), (0, 0), (1e-7, 3e-7), (-1e12, -1e11)],
        *[(0.3, 0.1 + 0.2), (-0.1 - 0.2, -0.3), (1732400000.12, 1732400000.13), (12345678901, 12345678902)],
        *[(1e6, 1e6 + 1.01e-3), (1e16, 1e16 + 2)],
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float) -> None:
    ticks = find_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize("values", [(0.3, 0.1 + 0.2), (1732400000.12, 1732400000.13), (12345678901, 12345678902)])
def test_values_that_hardly_differ_are_drawn(values: tuple[float, float]) -> None:
    chart = line_chart([Series("a", [Point(x, y) for x, y in enumerate(values)])], title="t")
    assert _count(chart, "polyline") == 1
    bars = [
        link.get("aria-label") for link in _parse(histogram(values, title="t", href=lambda *_: "?")).iter(SVG + "a")
    ]
    assert sum(int(str(bar).rpartition(" ")[2]) for bar in bars) == 2


def test_a_histogram_of_few_whole_numbers_has_a_bar_for_each() -> None:
    chart = histogram([1, 1, 2, 4], title="t")
    assert re.findall(r"<title>(\d+: \d+)</title>", chart) == ["1: 2", "2: 1", "4: 1"]


def test_a_histogram_counts_every_finite_value_once() -> None:
    chart = histogram([0, 0, 0.5, 1, 1, 1, math.nan, math.inf], title="t", href=lambda low, high: f"?from={low}")
    shown = [str(link.get("aria-label")) for link in _parse(chart).iter(SVG + "a")]
    assert sum(int(each.rpartition(" ")[2]) for each in shown) == 6


def test_a_long_heat_strip_keeps_the_largest_values() -> None:
    values: list[float | None] = [0.0] * 100_000
    values[70_001] = -9.0
    values[3], values[70_000] = None, math.nan
    chart = heat_strip(values, title="t", boundaries=[0, 50_000])
    assert [rect.get("fill-opacity") for rect in _parse(chart).iter(SVG + "rect")] == ["1.0"]
    assert heat_level(-9, 9) == -4
    assert heat_level(9, 9) == 4
    assert heat_level(None, 9) == 0
    assert heat_level(0.1, 9) == 0


def test_a_long_series_draws_a_bounded_number_of_dots() -> None:
    chart = line_chart([Series("a", [Point(x, x % 7, href=f"/{x}") for x in range(5000)])], title="t")
    links = [link.get("href") for link in _parse(chart).iter(SVG + "a")]
    assert len(links) <= 200
    assert links[-1] == "/4999"
