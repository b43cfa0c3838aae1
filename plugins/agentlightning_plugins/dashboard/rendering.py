"""Renders pages: the templates and static files, and the headers of every response."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader

from agentlightning_plugins.dashboard.views.training import describe_row
from agentlightning_plugins.shared.rendering.page import make_environment, read_style

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
STATIC_TYPES: Final = {"js": "text/javascript", "svg": "image/svg+xml"}


class Renderer:
    """The templates and the static files."""

    @cached_property
    def environment(self) -> Environment:
        """The templates of the dashboard and of all pages."""
        environment = make_environment(PackageLoader("agentlightning_plugins.dashboard"))
        environment.globals["describe_row"] = describe_row
        return environment

    def render(self, template: str, **values: Any) -> str:
        """Returns the HTML of a page."""
        return self.environment.get_template(template).render(**values)

    @cached_property
    def static(self) -> dict[str, tuple[str, bytes]]:
        """Type and contents of each file that pages load, by name."""
        folder = files("agentlightning_plugins.dashboard") / "static"
        found = {
            file.name: (STATIC_TYPES[file.name.rpartition(".")[2]], file.read_bytes())
            for file in folder.iterdir()
            if file.name.rpartition(".")[2] in STATIC_TYPES
        }
        return {**found, "dashboard.css": ("text/css", read_style().encode())}
