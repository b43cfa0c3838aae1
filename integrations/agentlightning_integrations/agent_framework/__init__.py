"""Microsoft Agent Framework: see ``agent.py``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_integrations.shared.framework.hooks import Framework

_framework = Framework(
    package="agent_framework", module="agentlightning_integrations.agent_framework.agent", extra="agent-framework"
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    return [
        Component("span_reader", "agent-framework", f"{__name__}.spans:READER", summary="Agent Framework's executors")
    ]
