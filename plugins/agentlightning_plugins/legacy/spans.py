"""Reads spans and rewards that Agent Lightning 0.1 to 0.3 recorded."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.types import Span

_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")


def _read_reward(span: Span) -> Any:
    for key in _OUTPUTS:  # the JSON that a function decorated with @reward returned
        output = semconv.parse_json(span.attributes.get(key))
        if isinstance(output, Mapping) and output.get("type") == "reward":
            return output.get("value")
    return span.attributes.get("reward") if span.name in (semconv.SPAN_REWARD, semconv.SPAN_ANNOTATION) else None


_RAW_CALL: Final = "raw_gen_ai_request"
"""Name of LiteLLM's span of a request and its answer, which the gateway of 0.3 recorded."""
_MAX_LENGTH: Final = 2**19


def _raw_field(span: Span, name: str) -> Any:
    """Returns a field of request or answer, ``llm.PROVIDER.FIELD``; lists and mappings are as Python writes them."""
    if span.name != _RAW_CALL:
        return None
    places = (key for key in span.attributes if key.startswith("llm.") and key.split(".", 2)[2:] == [name])
    value = span.attributes.get(next(places, ""))
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    parsed = semconv.parse_json(value)
    if parsed is None and len(value) <= _MAX_LENGTH:
        parsed = semconv.parse_json(json.dumps(ast.literal_eval(value)))
    return parsed


def _raw_choices(span: Span, name: str) -> list[Any] | None:
    choices = _raw_field(span, "choices")
    return None if choices is None else [choice[name] for choice in choices]


def _raw_answer(span: Span) -> Mapping[str, Any] | None:
    found = {name: _raw_field(span, name) for name in ("choices", "prompt_token_ids")}
    return found if found["choices"] else None


READER: Final[Mapping[str, Callable[[Span], Any]]] = {
    f"{semconv.REWARD}.0.value": _read_reward,
    semconv.GEN_AI_OPERATION_NAME: lambda span: "chat" if _raw_field(span, "messages") else None,
    semconv.GEN_AI_REQUEST_MODEL: lambda span: _raw_field(span, "model"),
    semconv.GEN_AI_RESPONSE_ID: lambda span: _raw_field(span, "id"),
    semconv.GEN_AI_INPUT_MESSAGES: lambda span: _raw_field(span, "messages"),
    semconv.GEN_AI_OUTPUT_MESSAGES: lambda span: _raw_choices(span, "message"),
    semconv.GEN_AI_FINISH_REASONS: lambda span: _raw_choices(span, "finish_reason"),
    semconv.GEN_AI_TOOL_DEFINITIONS: lambda span: _raw_field(span, "tools"),
    semconv.RAW_ANSWER: _raw_answer,
}
