"""Strands Agents: see ``agent.py``."""

from __future__ import annotations

from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(__name__, package="strands", extra="strands-agents", has="Agent")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
