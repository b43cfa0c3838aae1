"""Names and spans of Agent Lightning 0.1 to 0.3."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "legacy", f"{__name__}.spans:READER", summary="spans of 0.1 to 0.3")]
