"""AutoGen: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(__name__, package="autogen_agentchat", extra="autogen", agent_name="recipient_agent_type")
components, wrap_agent, instrument = _framework.components, _framework.wrap_agent, _framework.instrument
READER = _framework.reader
