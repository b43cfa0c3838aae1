"""The OpenAI Agents SDK: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(
    __name__, package="agents", extra="openai-agents", has="set_default_openai_client", agent_name="agent.name"
)
components, wrap_agent, instrument = _framework.components, _framework.wrap_agent, _framework.instrument
READER = _framework.reader
