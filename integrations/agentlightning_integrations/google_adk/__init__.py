"""Google ADK: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(__name__, package="google", extra="google-adk", has="adk")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
