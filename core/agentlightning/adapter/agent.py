"""Reads the name of an agent from its span, in the conventions of several frameworks."""

from __future__ import annotations

from agentlightning import semconv
from agentlightning.types import Span

_NAMES = (
    "agent.name",  # OpenAI Agents, AgentOps
    "gen_ai.agent.name",  # OpenTelemetry
    "recipient_agent_type",  # AutoGen
    "langchain.chain.type",  # LangGraph
    "executor.id",  # Agent Framework
)


def read_agent_name(span: Span) -> str | None:
    """Returns the name of the agent that a span belongs to, or None if the span does not name one."""
    attributes = span.attributes
    for key in _NAMES:
        if attributes.get(key):
            return str(attributes[key])
    if attributes.get("agentops.span.kind") == "agent" and attributes.get("operation.name"):
        return str(attributes["operation.name"])
    if attributes.get("openinference.span.kind") == "AGENT":
        return span.name
    if attributes.get("lc_name") and not semconv.is_llm_call(span):  # LangChain names its models like that too
        return str(attributes["lc_name"])
    return None
