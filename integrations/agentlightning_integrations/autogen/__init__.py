"""AutoGen: see ``agent.py``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_integrations.shared.framework.hooks import Framework

_framework = Framework(package="autogen_agentchat", module="agentlightning_integrations.autogen.agent", extra="autogen")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    return [Component("span_reader", "autogen", f"{__name__}.spans:READER", summary="names of AutoGen's agents")]
