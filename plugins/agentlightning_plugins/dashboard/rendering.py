"""Renders pages: the environment of the templates, and the headers of every response."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentlightning_plugins.charts.heat import heat_strip
from agentlightning_plugins.dashboard import charts, text
from agentlightning_plugins.dashboard.views.training import describe_row

CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
STATIC_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Renderer:
    """The templates and the static files."""

    @cached_property
    def environment(self) -> Environment:
        """Escapes every value, shortens long texts and shows hidden characters (``text.finalize``)."""
        environment = Environment(
            loader=PackageLoader("agentlightning_plugins.dashboard"),
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
        functions: dict[str, Any] = {
            "link": link,
            "heat_strip": heat_strip,
            "describe_row": describe_row,
            "reward_chart": charts.reward_chart,
            "metric_chart": charts.metric_chart,
            "ledger_histogram": charts.ledger_histogram,
            "compare_chart": charts.compare_chart,
            "distribution_histogram": charts.distribution_histogram,
        }
        environment.globals.update(functions)
        parts: Any = environment.get_template("parts.html.jinja").module
        environment.globals["parts"] = parts
        return environment

    def render(self, template: str, **values: Any) -> str:
        """Returns the HTML of a page."""
        return self.environment.get_template(template).render(**values)

    @cached_property
    def static(self) -> dict[str, tuple[str, bytes]]:
        """Type and contents of each file that pages load, by name."""
        folder = files("agentlightning_plugins.dashboard") / "static"
        return {
            file.name: (STATIC_TYPES[file.name.rpartition(".")[2]], file.read_bytes())
            for file in folder.iterdir()
            if file.name.rpartition(".")[2] in STATIC_TYPES
        }


def link(path: str, query: dict[str, Any] | None = None, **changes: Any) -> str:
    """Returns a path with a query, which omits parameters that are None or empty."""
    merged = {name: value for name, value in {**(query or {}), **changes}.items() if value not in (None, "")}
    return f"{path}?{urlencode(merged)}" if merged else path
