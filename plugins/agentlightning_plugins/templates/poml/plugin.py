"""The template engine ``poml``."""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> Iterable[Component]:
    return [
        Component(
            "template_engine",
            "poml",
            "agentlightning_plugins.templates.poml.engine:PomlEngine",
            extra="poml",
            summary="prompts in POML, the Prompt Orchestration Markup Language",
        ),
    ]
