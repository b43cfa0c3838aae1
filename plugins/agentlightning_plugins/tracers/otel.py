"""The tracer ``otel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_plugins.tracers.shared.indexed_messages import read_functions, read_messages, to_operation


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.shared.tracer:OtelTracer"
    return [
        Component("tracer", "otel", target, summary="OpenTelemetry, the default"),
        Component("span_reader", "openllmetry", f"{__name__}:READER", summary="OpenLLMetry's model calls"),
    ]


def _read_operation(span: Span) -> str | None:
    attributes = span.attributes
    kind = attributes.get("traceloop.span.kind", attributes.get("llm.request.type"))
    if kind is not None:
        return to_operation(kind)
    is_call = semconv.GEN_AI_REQUEST_MODEL in attributes and "gen_ai.prompt.0.role" in attributes
    return "chat" if is_call else None


def _read_finish_reasons(span: Span) -> Any:
    answers = semconv.read_indexed(span.attributes, "gen_ai.completion")
    return span.attributes.get("llm.finish_reason") or [answer.get("finish_reason") for answer in answers] or None


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_OPERATION_NAME: _read_operation,
    semconv.GEN_AI_TOOL_NAME: lambda span: span.attributes.get("traceloop.entity.name"),
    semconv.GEN_AI_FINISH_REASONS: _read_finish_reasons,
    semconv.GEN_AI_INPUT_MESSAGES: lambda span: read_messages(span, "gen_ai.prompt"),
    semconv.GEN_AI_OUTPUT_MESSAGES: lambda span: read_messages(span, "gen_ai.completion"),
    semconv.GEN_AI_TOOL_DEFINITIONS: read_functions,
}
