"""Pydantic AI: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(__name__, package="pydantic_ai", extra="pydantic-ai")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
