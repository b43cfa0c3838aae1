"""The OpenAI Agents SDK: see ``agent.py``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_integrations.shared.framework.hooks import Framework

_framework = Framework(
    package="agents",
    module="agentlightning_integrations.openai_agents.agent",
    extra="openai-agents",
    has="set_default_openai_client",
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "openai-agents", f"{__name__}.spans:READER", summary="agents of the OpenAI SDK")]
