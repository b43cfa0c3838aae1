"""Clients of the ``openai`` package: see ``client.py``."""

from __future__ import annotations

from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(package="openai", module="agentlightning_integrations.openai.client", extra="openai")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument
