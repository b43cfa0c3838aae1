"""One call of an agent, and the span it becomes.

The attributes follow OpenTelemetry's ``gen_ai`` conventions. What training needs is beside them: ``prompt_token_ids``,
``response_token_ids`` and ``logprobs`` (of the sampled tokens), ``agentlightning.weight_version``, and
``agentlightning.gateway.complete``, without which a call must not be trained on.

With n > 1 the unprefixed token data are those of choice 0; choice i > 0 has
``agentlightning.choice.{i}.response_token_ids`` and ``.logprobs`` (and ``.prompt_token_ids`` where prompts differ).
``gen_ai.output.messages`` and ``gen_ai.response.finish_reasons`` list all choices in order.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from agentlightning import semconv
from agentlightning.frozen import FrozenList
from agentlightning.types import Span, TraceStatus
from agentlightning_plugins.gateway.backends.backend import Backend
from agentlightning_plugins.gateway.dialects.dialect import (
    Asked,
    Choice,
    Completion,
    Dialect,
    Translation,
    Untranslatable,
)
from agentlightning_plugins.gateway.dialects.json_text import dump_json
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.limits.budget import BACKEND, COST

_OK: Final = TraceStatus(status_code="OK")
_ALL: Final = Asked(True, True)
_LEAST: Final = -(2**63)
_GREATEST: Final = 2**63 - 1
_MAX_DESCRIPTION: Final = 2000
_SAMPLING: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
    "stop_sequences": "gen_ai.request.stop_sequences",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-|$)")


class TraceContext(NamedTuple):
    """Where a call's span belongs: under the agent's own span if the request names one, else at the root of a trace."""

    trace_id: str
    span_id: str
    parent_id: str | None
    flags: str

    @classmethod
    def from_header(cls, traceparent: str | None) -> TraceContext:
        """Reads W3C's ``traceparent``; a missing or malformed one begins a trace."""
        match = _TRACEPARENT.match(traceparent) if traceparent else None
        span_id = f"{random.getrandbits(64):016x}"
        if match is None:
            return cls(f"{random.getrandbits(128):032x}", span_id, None, "01")
        return cls(match[1], span_id, match[2], match[3])

    def to_header(self) -> str:
        """What the backend is told, so that its own spans come under this one."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


@dataclass(slots=True)
class Call:
    """What is known of one call while it is relayed."""

    attempt: tuple[str, str] | None
    """Rollout and attempt id; None when the URL names none: such a call is relayed and not recorded."""
    dialect: Dialect
    """What the agent speaks."""
    text: bytes
    """The request as the agent sent it."""
    body: dict[str, Any]
    """The same, parsed."""
    model: str
    trace: TraceContext
    query: str = ""
    """Of the agent's URL, without the question mark."""
    wire: Dialect = field(init=False)
    """What the backend is spoken to in: the agent's dialect, or Chat Completions when ``translation`` is set."""
    translation: Translation | None = None
    sent_text: bytes | None = None
    """The request to a backend, before the fields that are set for it; None: ``sent_body`` was never text."""
    sent_body: dict[str, Any] = field(init=False)
    asked: Asked = _ALL
    """What the agent gets of what the gateway asks for; everything when the call is not recorded."""
    start_time: float = field(default_factory=time.time)
    first_time: float = 0.0
    """When the first bytes of a stream came."""
    end_time: float = 0.0
    backend: Backend | None = None
    """The one that answered, or was tried last."""
    completion: Completion = field(default_factory=Completion)
    is_complete: bool = False
    """Whether the backend's answer arrived whole."""
    exceeded_budget: str | None = None
    """What of the attempt's budget was used up before this call, which is why it was not made."""
    http_status: int | None = None
    """Of the answer to the agent, when that is an error."""
    error: str | None = None

    def __post_init__(self) -> None:
        self._speak(self.dialect)

    def prepare_for(self, backend: Backend) -> None:
        """Makes the call ready for a backend, in a dialect that this one speaks.

        Raises:
            Untranslatable: the backend speaks neither the agent's dialect nor one that this call can be translated to.
        """
        self.backend = backend
        spoken = backend.provider.dialects
        if self.dialect.name in spoken:
            if self.wire is not self.dialect:
                self._speak(self.dialect)
            return
        if self.translation is None or self.wire is self.dialect:
            translation = self.dialect.translate(self.body) if CHAT.name in spoken else None
            if translation is None:
                raise Untranslatable(
                    f"{backend.endpoint} of model {self.model!r} does not speak {self.dialect.name}, only "
                    f"{', '.join(sorted(spoken))}; set the entry's 'provider' if it does, or to 'litellm'"
                )
            self._speak(CHAT, translation)

    def redact_key(self, text: bytes) -> bytes:
        """Blacks out the key of the backend that was asked: some servers quote the one that they do not like."""
        return text if self.backend is None else self.backend.redact_key(text)

    @property
    def path(self) -> str:
        """Where the request goes at the backend, below ``/v1/``."""
        return self.wire.path if not self.query or self.translation is not None else f"{self.wire.path}?{self.query}"

    def _speak(self, wire: Dialect, translation: Translation | None = None) -> None:
        self.wire, self.translation = wire, translation
        self.sent_text, self.sent_body = (
            (self.text, self.body) if translation is None else (None, translation.request())
        )
        if self.attempt is not None:
            self.asked = wire.read_asked(self.sent_body)


def used_tokens(call: Call) -> tuple[int, int]:
    """Input and output tokens of a call, as the backend said or as they were counted."""
    completion = call.completion
    if completion.input_tokens is not None:
        return _count(completion.input_tokens), _count(completion.output_tokens)
    choices = completion.choices.values()
    prompt = completion.prompt_token_ids or next((c.prompt_token_ids for c in choices if c.prompt_token_ids), None)
    return len(prompt or ()), sum(len(choice.token_ids or ()) for choice in choices)


def _count(said: object) -> int:
    """A number of tokens as a backend says it, which may be anything."""
    return said if isinstance(said, int) else 0


def call_to_span(call: Call) -> Span:
    """Makes the span of a finished call that has an attempt; ``sequence_id`` is left to the store."""
    assert call.attempt is not None
    rollout_id, attempt_id = call.attempt
    attributes: dict[str, Any] = {
        semconv.GEN_AI_OPERATION_NAME: call.dialect.operation,
        semconv.GEN_AI_REQUEST_MODEL: call.model,
        semconv.GATEWAY_COMPLETE: call.is_complete,
    }
    body: Mapping[str, Any] = call.sent_body
    if call.backend is not None:
        attributes[semconv.GEN_AI_PROVIDER_NAME] = call.backend.provider.name
        attributes[BACKEND] = call.backend.endpoint
        if call.backend.price is not None:
            attributes[COST] = call.backend.price.cost(*used_tokens(call))
        if call.backend.sampling_parameters:
            body = {**body, **call.backend.sampling_parameters}
    for key in sorted(_SAMPLING.keys() & body.keys(), reverse=True):  # so that max_tokens gives way to its successors
        value = body[key]
        if value is not None:
            attributes[_SAMPLING[key]] = [value] if key == "stop" and isinstance(value, str) else value
    if call.first_time:
        attributes[semconv.GEN_AI_TIME_TO_FIRST_CHUNK] = call.first_time - call.start_time
    if call.exceeded_budget is not None:
        attributes["agentlightning.gateway.budget_exceeded"] = call.exceeded_budget
    if call.http_status is not None:
        attributes["http.response.status_code"] = call.http_status
    if call.error is not None:
        attributes["error.type"] = str(call.http_status or "_OTHER")
    _add_input(call, attributes)
    _add_output(call.completion, attributes)
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trace_id=call.trace.trace_id,
        span_id=call.trace.span_id,
        parent_id=call.trace.parent_id,
        name=call.dialect.span_name,
        status=_OK
        if call.error is None
        else TraceStatus(status_code="ERROR", description=call.error[:_MAX_DESCRIPTION]),
        start_time=call.start_time,
        end_time=call.end_time,
    )


def _add_input(call: Call, attributes: dict[str, Any]) -> None:
    try:
        messages, tools = call.wire.read_messages(call.sent_body), call.wire.read_tools(call.sent_body)
    except (AttributeError, KeyError, TypeError, ValueError):  # the agent sent what the backend will have refused
        attributes[semconv.GEN_AI_INPUT_MESSAGES] = "[]"
        return
    attributes[semconv.GEN_AI_INPUT_MESSAGES] = dump_json(messages).decode()
    if tools:
        attributes[semconv.GEN_AI_TOOL_DEFINITIONS] = dump_json(tools).decode()


def _add_output(completion: Completion, attributes: dict[str, Any]) -> None:
    choices = sorted(completion.choices.items())
    first = completion.choices.get(0) or Choice()
    prompt_token_ids = completion.prompt_token_ids or first.prompt_token_ids
    input_tokens, output_tokens = completion.input_tokens, completion.output_tokens
    if input_tokens is None and prompt_token_ids is not None:  # a stream tells its usage only when asked
        input_tokens = len(prompt_token_ids)
        output_tokens = sum(len(choice.token_ids or ()) for _, choice in choices)
    known = {
        semconv.GEN_AI_RESPONSE_ID: completion.id,
        semconv.GEN_AI_RESPONSE_MODEL: completion.model,
        semconv.GEN_AI_INPUT_TOKENS: input_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: output_tokens,
        semconv.WEIGHT_VERSION: completion.weight_version,
        semconv.PROMPT_TOKEN_IDS: _freeze_numbers(prompt_token_ids),
        semconv.RESPONSE_TOKEN_IDS: _freeze_numbers(first.token_ids),
        semconv.LOGPROBS: _freeze_numbers(first.logprobs),
    }
    for index, choice in choices:
        if index == 0:
            continue
        prefix = f"{semconv.CHOICE}.{index}"
        known[f"{prefix}.{semconv.RESPONSE_TOKEN_IDS}"] = choice.token_ids
        known[f"{prefix}.{semconv.LOGPROBS}"] = choice.logprobs
        if choice.prompt_token_ids != first.prompt_token_ids:
            known[f"{prefix}.{semconv.PROMPT_TOKEN_IDS}"] = choice.prompt_token_ids
    attributes.update((name, value) for name, value in known.items() if value is not None)
    if choices:
        attributes[semconv.GEN_AI_FINISH_REASONS] = [choice.finish_reason or "" for _, choice in choices]
        attributes[semconv.GEN_AI_OUTPUT_MESSAGES] = dump_json([choice.to_message() for _, choice in choices]).decode()


def _freeze_numbers(values: Any) -> Any:
    """Freezes a list of numbers in a fraction of the time that it takes to look at each; leaves anything else.

    Their sum tells that they are numbers, finite and of 64 bits.
    """
    try:
        return FrozenList(values) if type(values) is list and _LEAST <= sum(values) <= _GREATEST else values
    except TypeError:
        return values
