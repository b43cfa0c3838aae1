"""The OpenAI Agents SDK: see ``agent.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(
    package="agents",
    module="agentlightning_integrations.openai_agents.agent",
    extra="openai-agents",
    has="set_default_openai_client",
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "openai-agents", f"{__name__}:READER", summary="agents of the OpenAI SDK")]


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_AGENT_NAME: lambda span: span.attributes.get("agent.name")
}
