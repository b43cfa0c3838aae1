"""The template engine ``jinja``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.templates.jinja.engine:JinjaEngine"
    return [Component("template_engine", "jinja", target, summary="prompts in Jinja, in a sandbox")]
