"""The OpenAI Agents SDK: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.framework.hooks import Framework

_framework = Framework(
    package="agents",
    module="agentlightning_integrations.openai_agents.agent",
    extra="openai-agents",
    has="set_default_openai_client",
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
