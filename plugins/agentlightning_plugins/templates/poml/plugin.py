"""The template engine ``poml``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.templates.poml.engine:PomlEngine"
    return [
        Component(
            "template_engine",
            "poml",
            target,
            extra="poml",
            summary="prompts in POML, the Prompt Orchestration Markup Language",
        )
    ]
