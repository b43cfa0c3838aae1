"""LangChain and LangGraph: see ``agent.py``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_integrations.shared.hooks import Framework

_framework = Framework(__name__, package="langchain_core", extra="langchain")
wrap_agent, instrument = _framework.wrap_agent, _framework.instrument


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_integrations.langchain.trace:handler_of"
    return [
        Component("handler", "langchain", target, extra="langchain", summary="LangChain's runs as spans"),
        Component("span_reader", "langchain", f"{__name__}:READER", summary="names of agents of LangChain"),
    ]


def _read_agent_name(span: Span) -> Any:
    attributes = span.attributes
    if chain := attributes.get("langchain.chain.type"):
        return chain
    if attributes.get("openinference.span.kind") == "CHAIN" and span.name in _read_names(attributes.get("metadata")):
        return span.name
    model_or_agent = attributes.get("lc_name")
    return model_or_agent if model_or_agent and not semconv.is_llm_call(span) else None


def _read_names(metadata: object) -> tuple[object, ...]:
    """Returns the names of the agent and of the graph's node from OpenInference's attribute ``metadata``."""
    if not isinstance(metadata, str) or "lang" not in metadata:
        return ()
    try:
        found = json.loads(metadata)
        is_node_of_agent = found.get("ls_integration") == "langchain_create_agent"  # its nodes are model and tools
        return found.get("lc_agent_name"), None if is_node_of_agent else found.get("langgraph_node")
    except (AttributeError, ValueError):
        return ()


READER: Final[Mapping[str, Callable[[Span], Any]]] = {semconv.GEN_AI_AGENT_NAME: _read_agent_name}
