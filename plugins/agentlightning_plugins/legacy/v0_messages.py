"""The messages of Agent Lightning 0.1, and the spans and rewards that 0.1 to 0.3 recorded."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from pydantic import BaseModel, Field

import agentlightning as agl
from agentlightning import semconv
from agentlightning.types import Span, Triplet


class Task(BaseModel):
    """A claimed rollout."""

    rollout_id: str
    input: Any
    mode: str | None = None
    resources_id: str | None = None
    create_time: float | None = None
    last_claim_time: float | None = None
    num_claims: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskIfAny(BaseModel):
    """The answer of ``/task``."""

    is_available: bool
    task: Task | None = None


class RolloutLegacy(BaseModel):
    """The report of an agent on a rollout."""

    rollout_id: str
    task: Task | None = None
    final_reward: float | None = None
    triplets: list[Triplet] | None = None
    trace: list[dict[str, Any]] | None = None
    """Spans as ``json.loads(readable_span.to_json())`` of OpenTelemetry, or as our own JSON."""
    logs: list[str] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


def read_spans(report: RolloutLegacy, rollout_id: str, attempt_id: str) -> list[Span]:
    """Returns the spans of a report, with its reward; raises ValueError, TypeError or AttributeError.

    Tokens that the agent reports are left out: weights are trained on those that the gateway recorded.
    """
    ids = rollout_id, attempt_id
    spans = [_read_span(span, *ids) for span in report.trace or ()]
    if not spans:
        spans = [span for triplet in report.triplets or () for span in _from_triplet(triplet, *ids)]
    if report.final_reward is not None and report.final_reward != agl.find_final_reward(spans):
        spans.append(_make_reward(report.final_reward, *ids))
    return list(map(semconv.distrust, spans))


def _read_span(span: Mapping[str, Any], rollout_id: str, attempt_id: str) -> Span:
    if "trace_id" in span:
        return Span.model_validate({**span, "rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": 0})
    context = span.get("context") or {}
    parent = span.get("parent_id")
    return _make_span(
        span.get("attributes") or {},
        rollout_id,
        attempt_id,
        name=span.get("name"),
        trace_id=str(context.get("trace_id") or "").removeprefix("0x") or None,
        span_id=str(context.get("span_id") or "").removeprefix("0x") or None,
        parent_id=None if parent is None else str(parent).removeprefix("0x"),
        start_time=_read_time(span.get("start_time")),
        end_time=_read_time(span.get("end_time")),
    )


def _read_time(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _make_reward(reward: float, rollout_id: str, attempt_id: str) -> Span:
    attributes = {f"{semconv.REWARD}.0.name": "primary", f"{semconv.REWARD}.0.value": reward}
    return _make_span(attributes, rollout_id, attempt_id, name=semconv.SPAN_REWARD)


def _from_triplet(triplet: Triplet, rollout_id: str, attempt_id: str) -> Iterator[Span]:
    attributes: dict[str, Any] = {semconv.GEN_AI_OPERATION_NAME: "chat"}
    for key, part in ((semconv.PROMPT_TOKEN_IDS, triplet.prompt), (semconv.RESPONSE_TOKEN_IDS, triplet.response)):
        if tokens := part.get("token_ids") if isinstance(part, Mapping) else part:
            attributes[key] = tokens
    yield _make_span(attributes, rollout_id, attempt_id, name="openai.chat")
    if triplet.reward is not None:
        yield _make_reward(triplet.reward, rollout_id, attempt_id)


def _make_span(attributes: Mapping[str, Any], rollout_id: str, attempt_id: str, **others: Any) -> Span:
    return Span.from_attributes(attributes=attributes, rollout_id=rollout_id, attempt_id=attempt_id, **others)


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
