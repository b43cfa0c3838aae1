"""Pages from templates: served by the dashboard, or written to a file that loads nothing else."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined

from agentlightning_plugins.shared.charts.heat import heat_strip
from agentlightning_plugins.shared.rendering import charts, text

_PACKAGE: Final = "agentlightning_plugins.shared.rendering"


def make_environment(*loaders: BaseLoader) -> Environment:
    """Returns an environment that escapes values, shortens long texts and shows hidden characters.

    Its templates come from ``loaders`` and from this package: ``parts`` and ``result``, and the layout ``file``.
    """
    environment = Environment(
        loader=ChoiceLoader([*loaders, PackageLoader(_PACKAGE)]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=text.finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "line": text.show_line,
        "short": lambda value: text.show_text(value, 2_000),
        "dump": text.dump,
        "number": text.show_number,
        "span": text.show_span,
        "instant": text.show_time,
        "ago": text.show_ago,
        "part": lambda value: quote(str(value), safe=""),
    }
    environment.filters.update(filters)
    environment.globals.update(
        link=link,
        heat_strip=heat_strip,
        reward_chart=charts.reward_chart,
        metric_chart=charts.metric_chart,
        ledger_histogram=charts.ledger_histogram,
        compare_chart=charts.compare_chart,
        distribution_histogram=charts.distribution_histogram,
    )
    for name in ("parts", "result"):
        environment.globals[name] = environment.get_template(f"{name}.html.jinja").module
    return environment


def link(path: str, query: dict[str, Any] | None = None, **changes: Any) -> str:
    """Returns a path with a query, which omits parameters that are None or empty."""
    merged = {name: value for name, value in {**(query or {}), **changes}.items() if value not in (None, "")}
    return f"{path}?{urlencode(merged)}" if merged else path


def read_style() -> str:
    """Returns the style sheet of all pages."""
    return (files(_PACKAGE) / "dashboard.css").read_text(encoding="utf-8")


def write_page(template: Path, file: Path, **values: Any) -> Path:
    """Renders a template that extends ``file.html.jinja``, and writes the page to a file.

    Raises:
        OSError: the file cannot be written.
    """
    page = make_environment().from_string(template.read_text(encoding="utf-8"))
    html = page.render(style=read_style(), **values)
    file.write_text(html, encoding="utf-8", errors="replace")
    return file
