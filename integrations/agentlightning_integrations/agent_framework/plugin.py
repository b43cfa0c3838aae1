"""Microsoft Agent Framework: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.framework.hooks import Framework

_framework = Framework(
    package="agent_framework", module="agentlightning_integrations.agent_framework.agent", extra="agent-framework"
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
