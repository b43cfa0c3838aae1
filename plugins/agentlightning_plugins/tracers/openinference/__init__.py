"""The tracer ``openinference``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.records import Span
from agentlightning_plugins.tracers.shared.indexed_messages import read_functions, read_messages, to_operation

_METHOD: Final = re.compile(r"\.(_execute_core|a?run|a?run_stream|forward|kickoff|__call__)$")


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.openinference.tracer:OpenInferenceTracer"
    summary = "OpenInference's instrumentation"
    return [
        Component("tracer", "openinference", target, extra="openinference", summary=summary),
        Component("span_reader", "openinference", f"{__name__}:READER", summary="OpenInference's spans"),
    ]


def _read_operation(span: Span) -> str | None:
    return to_operation(span.attributes.get("openinference.span.kind"))


def _read_agent_name(span: Span) -> str | None:
    """Returns the name of a span of the kind AGENT, without the method that some instrumentors append."""
    if _read_operation(span) != "invoke_agent":
        return None
    return str(span.attributes.get("agent.name") or _METHOD.sub("", span.name))


def _read_raw_answer(span: Span) -> Mapping[str, Any]:
    """Returns the server's original answer to a model call."""
    if span.attributes.get("openinference.span.kind") != "LLM":
        return {}
    parsed = semconv.parse_json(span.attributes.get("output.value"))
    return parsed if isinstance(parsed, dict) else {}


def _read_finish_reasons(span: Span) -> Any:
    answers = _read_raw_answer(span).get("choices") or ()
    return span.attributes.get("llm.finish_reason") or [answer.get("finish_reason") for answer in answers] or None


def _read_tools(span: Span) -> Any:
    tools = [item["tool"] for item in semconv.read_indexed(span.attributes, "llm.tools") if "tool" in item]
    return [semconv.parse_json(tool["json_schema"]) for tool in tools] or read_functions(span)


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    semconv.GEN_AI_OPERATION_NAME: _read_operation,
    semconv.GEN_AI_AGENT_NAME: _read_agent_name,
    semconv.GEN_AI_TOOL_NAME: lambda span: span.attributes.get("tool.name") or span.attributes.get("tool_name"),
    semconv.GEN_AI_REQUEST_MODEL: lambda span: span.attributes.get("llm.model_name"),
    semconv.GEN_AI_RESPONSE_ID: lambda span: _read_raw_answer(span).get("id"),
    semconv.GEN_AI_FINISH_REASONS: _read_finish_reasons,
    semconv.GEN_AI_INPUT_MESSAGES: lambda span: read_messages(span, "llm.input_messages"),
    semconv.GEN_AI_OUTPUT_MESSAGES: lambda span: read_messages(span, "llm.output_messages"),
    semconv.GEN_AI_TOOL_DEFINITIONS: _read_tools,
    semconv.RAW_ANSWER: _read_raw_answer,
}
