"""The tracer ``agentops``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_plugins.tracers.shared.indexed_messages import to_operation


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.agentops.tracer:AgentOpsTracer"
    summary = "AgentOps' instrumentation without its cloud"
    return [
        Component("tracer", "agentops", target, extra="agentops", summary=summary),
        Component("span_reader", "agentops", f"{__name__}:READER", summary="AgentOps' spans"),
    ]


def _read_operation(span: Span) -> str | None:
    return to_operation(span.attributes.get("agentops.span.kind"))


def _read_agent_name(span: Span) -> Any:
    return span.attributes.get("operation.name") if _read_operation(span) == "invoke_agent" else None


def _read_tool_call(span: Span) -> semconv.Message | None:
    attributes = span.attributes
    if "tool.call.id" not in attributes or "tool.name" not in attributes:
        return None
    arguments = attributes.get("tool.parameters") or ""
    return semconv.make_tool_call(attributes["tool.call.id"], attributes["tool.name"], arguments)


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_OPERATION_NAME: _read_operation,
    semconv.GEN_AI_AGENT_NAME: _read_agent_name,
    semconv.GEN_AI_TOOL_NAME: lambda span: span.attributes.get("tool.name") or span.attributes.get("operation.name"),
    semconv.ANSWERED_TOOL_CALL: _read_tool_call,
}
