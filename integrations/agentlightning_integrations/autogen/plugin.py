"""AutoGen: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.framework.hooks import Framework

_framework = Framework(package="autogen_agentchat", module="agentlightning_integrations.autogen.agent", extra="autogen")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
