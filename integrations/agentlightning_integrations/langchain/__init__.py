"""LangChain and LangGraph: see ``agent.py``."""

from __future__ import annotations

from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_integrations.shared.framework.hooks import Framework

_framework = Framework(
    package="langchain_core", module="agentlightning_integrations.langchain.agent", extra="langchain"
)
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_integrations.langchain.trace:handler_of"
    return [
        Component("handler", "langchain", target, extra="langchain", summary="LangChain's runs as spans"),
        Component("span_reader", "langchain", f"{__name__}.spans:READER", summary="names of agents of LangChain"),
    ]
