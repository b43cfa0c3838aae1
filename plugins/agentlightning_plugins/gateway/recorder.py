"""Records how a call ended: in metrics, in the cache of answers, and as a span in the store.

The attributes of the span follow OpenTelemetry's ``gen_ai`` conventions. Training also needs ``prompt_token_ids``,
``response_token_ids`` and ``logprobs`` (of the sampled tokens), ``agentlightning.weight_version`` (and
``agentlightning.weight_versions`` of the tokens, if the weights changed during the answer), and
``agentlightning.gateway.complete``; calls for which this is false must not be trained on.

With n > 1 the unprefixed token data belong to choice 0; choice i > 0 has
``agentlightning.choice.{i}.response_token_ids`` and ``.logprobs`` (and ``.prompt_token_ids`` if prompts differ).
``gen_ai.output.messages`` and ``gen_ai.response.finish_reasons`` list all choices in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web

from agentlightning import semconv
from agentlightning.errors import StoreError
from agentlightning.frozen import FrozenNumbers
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey, SpanWriter
from agentlightning.types import Span, TraceStatus
from agentlightning_plugins.gateway.access import EndedAttempts
from agentlightning_plugins.gateway.backends.answer_cache import CACHE_ANSWER, CACHE_KEY, AnswerCache
from agentlightning_plugins.gateway.call import ModelCall, stated_tokens, used_tokens
from agentlightning_plugins.gateway.control import GatewayMetrics
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED, CallRefused, CompletionChoice, Dialect
from agentlightning_plugins.gateway.dialects.wire import dump_json
from agentlightning_plugins.gateway.limits import BACKEND, BUDGET_EXCEEDED, COST, TOKENS, UsageTracker

logger = logging.getLogger("agentlightning")
_STORE_WAIT_S: Final = 1.0
"""How long an answer may wait until its call is stored."""
_RECOVERY_WAIT_S: Final = 30.0
"""How long an answer may wait until its attempt is no longer stored as failing; else the attempt would fail."""
_MAX_ATTEMPTS: Final = 1000
_DISCONNECTED: Final = 499
"""As in nginx; for the metrics only."""


@dataclass(frozen=True)
class CallRecorder:
    """Records the calls of one gateway."""

    store: LightningStore
    writer: SpanWriter
    usage: UsageTracker
    metrics: GatewayMetrics
    cache: AnswerCache | None
    ended: EndedAttempts
    fails_attempts: bool
    _warned: set[str] = field(default_factory=set, init=False)
    _without_tools: dict[AttemptKey, None] = field(default_factory=dict, init=False)
    """Attempts whose tools were left out, which is logged once."""

    def finish(self, call: ModelCall, status: int, error: str | None = None) -> None:
        """Counts a finished call and passes it to the span writer, once.

        Must be called before the agent gets the end of its answer: a flush after an answer must include its span.
        """
        if call.end_time:
            return
        call.end_time = call.now()
        call.error = call.error or error
        if self.cache is not None:
            self.cache.keep(call)
        self.metrics.count(call, str(status))
        if call.attempt is None:
            return
        if call.backend is not None:
            tokens, price = used_tokens(call), call.backend.price
            self.usage.add(call.attempt, sum(tokens), price.cost(*tokens) if price is not None else 0.0)
        if call.history is not None:
            call.history.remember(call.attempt, call.completion)
        self.writer.put(call_to_span(call, is_late=self.ended.is_over(call.attempt)))
        if call.left_out_tools and call.attempt not in self._without_tools:
            self._without_tools[call.attempt] = None
            if len(self._without_tools) > _MAX_ATTEMPTS:
                del self._without_tools[next(iter(self._without_tools))]
            logger.warning(
                "attempt %s offers tools that only OpenAI runs: %s. Its model %r gets the other tools",
                call.attempt[1],
                ", ".join(sorted(set(call.left_out_tools))),
                call.model,
            )
        if call.is_complete and call.model not in self._warned:
            self._check_token_ids(call)

    def refuse(self, call: ModelCall, refusal: CallRefused) -> web.Response:
        """Records a refused call and returns its answer."""
        call.http_status, call.error_code = refusal.status, refusal.code
        self.finish(call, refusal.status, str(refusal))
        return refusal.to_response(call.dialect)

    def abandon(self, call: ModelCall) -> None:
        """Records a call whose agent has disconnected."""
        self.finish(call, _DISCONNECTED, "the agent disconnected before the answer was complete")

    async def wait_until_stored(self, call: ModelCall) -> None:
        """Waits, for a limited time, until a durable store contains a finished call, and each store a failure.

        The agent gets the end of its answer afterwards, so the store has all calls of a rollout that has succeeded,
        even if this process is killed.
        """
        if call.attempt is not None and self.fails_attempts and call.generates:
            await self._note_failure(call, call.attempt)
        if call.attempt is not None and self.store.capabilities["durable"]:
            await self.writer.flush(*call.attempt, timeout_s=_STORE_WAIT_S)

    async def _note_failure(self, call: ModelCall, attempt: AttemptKey) -> None:
        """Writes to an attempt whether its last call failed; if so, it fails too, whatever its agent returns."""
        has_failed = not call.is_complete and call.error_code not in (BUDGET_EXCEEDED, "attempt_over")
        failing = self.ended.failing
        if failing.get(attempt, False) if has_failed else attempt not in failing:
            return
        if has_failed:  # a write that is not answered in time may be executed later
            failing[attempt] = False
            if len(failing) > _MAX_ATTEMPTS:
                del failing[next(iter(failing))]
        try:
            async with asyncio.timeout(_STORE_WAIT_S if has_failed else _RECOVERY_WAIT_S):
                known = await self.store.query_attempts(attempt[0])
                metadata = next((each.metadata or {} for each in known if each.attempt_id == attempt[1]), {})
                message = (call.error or "")[:_MAX_DESCRIPTION] if has_failed else None
                await self.store.update_attempt(*attempt, metadata={**metadata, MODEL_ERROR: message})
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("attempt %s: how its last model call ended could not be stored: %s", attempt[1], error)
            return
        if has_failed:
            failing[attempt] = True
        else:
            failing.pop(attempt, None)  # several calls may end at once

    def _check_token_ids(self, call: ModelCall) -> None:
        if all(choice.token_ids is not None for choice in call.completion.choices.values()):
            return
        self._warned.add(call.model)
        logger.warning(
            "model %r at %s returns no token ids, so its calls cannot train a model (prompts can still be tuned). "
            "Serve it with vLLM >= 0.10.2 or another server that supports return_token_ids",
            call.model,
            call.backend.endpoint if call.backend is not None else "?",
        )


_OK: Final = TraceStatus(status_code="OK")
_MIN_INT64: Final = -(2**63)
_MAX_INT64: Final = 2**63 - 1
_MAX_DESCRIPTION: Final = 2000
_SAMPLING: Final = {
    **{key: key for key in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop_sequences"),
    "n": "choice.count",
}
"""Sampling parameters of all dialects, and their names below ``gen_ai.request``."""


def call_to_span(call: ModelCall, *, is_late: bool = False) -> Span:
    """Returns the span of a finished call of an attempt, which may have ended. The store assigns ``sequence_id``."""
    assert call.attempt is not None
    rollout_id, attempt_id = call.attempt
    attributes: dict[str, Any] = {
        semconv.GEN_AI_OPERATION_NAME: call.dialect.operation,
        semconv.GEN_AI_REQUEST_MODEL: call.model,
        semconv.GATEWAY_COMPLETE: call.is_complete,
        **({semconv.LATE: True} if is_late else {}),
    }
    dialect, body = (call.dialect, call.body) if call.request is None else (call.request.dialect, call.request.body)
    forced: Mapping[str, Any] = {}
    if call.backend is not None:
        attributes[semconv.GEN_AI_PROVIDER_NAME] = call.backend.provider.name
        attributes[BACKEND] = call.backend.endpoint
        used = used_tokens(call)
        attributes[TOKENS] = sum(used)
        if call.backend.price is not None:
            attributes[COST] = call.backend.price.cost(*used)
        forced = call.backend.sampling_parameters if call.generates else {}
    replaced = [name for name, value in forced.items() if body.get(name) not in (None, {}, value)]
    if replaced:
        attributes[semconv.GATEWAY_REPLACED] = sorted(replaced)
    sampling = {**body, **(forced if call.request is None else call.request.sampling)}
    for key in sorted(_SAMPLING.keys() & sampling.keys(), reverse=True):  # the successors of max_tokens overwrite it
        value = sampling[key]
        if key == "stop" and isinstance(value, str):
            value = [value]
        if value is not None:
            attributes[f"gen_ai.request.{_SAMPLING[key]}"] = value
    if call.conversation is not None and call.generates:
        attributes[semconv.GEN_AI_CONVERSATION_ID] = call.conversation
        if call.parent_conversation is not None:
            attributes |= {semconv.PARENT_CONVERSATION: call.parent_conversation, semconv.GEN_AI_AGENT_NAME: "subagent"}
    if call.retry_of is not None:
        attributes[semconv.RETRY_OF] = call.retry_of
    if call.first_time:
        attributes[semconv.GEN_AI_TIME_TO_FIRST_CHUNK] = call.first_time - call.start_time
    if call.cache_key is not None:
        attributes |= {CACHE_KEY: call.cache_key, CACHE_ANSWER: call.answer.decode()}
    if call.error_code == BUDGET_EXCEEDED:
        attributes["agentlightning.gateway.budget_exceeded"] = call.error
    if call.http_status is not None:
        attributes["http.response.status_code"] = call.http_status
    status = _OK
    if call.error is not None:
        attributes["error.type"] = str(call.http_status or "_OTHER")
        status = TraceStatus(status_code="ERROR", description=call.error[:_MAX_DESCRIPTION])
    if call.left_out_tools:
        attributes["agentlightning.gateway.left_out_tools"] = sorted(set(call.left_out_tools))
    _add_input(dialect, body, attributes)
    if body.get("echo"):
        _drop_echo(call)
    _add_output(call, attributes)
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trace_id=call.trace.trace_id,
        span_id=call.trace.span_id,
        parent_id=call.trace.parent_id,
        name=call.dialect.span_name + (semconv.CACHED_SUFFIX if call.is_cached else ""),
        status=status,
        start_time=call.start_time,
        end_time=call.end_time,
    )


def _add_input(dialect: Dialect, body: Mapping[str, Any], attributes: dict[str, Any]) -> None:
    messages: list[dict[str, Any]] = []
    tools: Sequence[Any] = ()
    with contextlib.suppress(*MALFORMED):  # a malformed request, which the backend refused too
        messages = dialect.read_messages(body)
    with contextlib.suppress(*MALFORMED):
        tools = dialect.read_tools(body)
    attributes[semconv.GEN_AI_INPUT_MESSAGES] = dump_json(messages).decode()
    if tools:
        attributes[semconv.GEN_AI_TOOL_DEFINITIONS] = dump_json(tools).decode()


def _drop_echo(call: ModelCall) -> None:
    """Drops the log-probabilities of the prompt's tokens, which Completions with ``echo`` repeat."""
    for choice in call.completion.choices.values():
        if choice.logprobs is not None and choice.token_ids is not None:
            choice.logprobs = choice.logprobs[max(len(choice.logprobs) - len(choice.token_ids), 0) :]


def _add_output(call: ModelCall, attributes: dict[str, Any]) -> None:
    completion = call.completion
    choices = sorted(completion.choices.items())
    first = completion.choices.get(0) or CompletionChoice()
    prompt_token_ids = completion.prompt_token_ids or first.prompt_token_ids
    input_tokens, output_tokens = stated_tokens(completion)
    if input_tokens is None and prompt_token_ids is not None:  # a stream states its usage only on request
        input_tokens = len(prompt_token_ids)
        output_tokens = sum(len(choice.token_ids or ()) for _, choice in choices)
    known = {
        semconv.GEN_AI_RESPONSE_ID: completion.id,
        semconv.GEN_AI_RESPONSE_MODEL: completion.model,
        semconv.GEN_AI_INPUT_TOKENS: input_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: output_tokens,
        semconv.WEIGHT_VERSION: completion.weight_version,
        "agentlightning.gateway.forced_tokens": completion.forced_tokens,
        semconv.TOOL_CALLS_UNPARSED: completion.tool_calls_unparsed or None,
        semconv.PROMPT_TOKEN_IDS: _freeze_numbers(prompt_token_ids),
        semconv.RESPONSE_TOKEN_IDS: _freeze_numbers(first.token_ids),
        semconv.LOGPROBS: _freeze_numbers(first.logprobs),
        semconv.WEIGHT_VERSIONS: first.weight_versions,
    }
    for index, choice in choices:
        if index == 0:
            continue
        prefix = f"{semconv.CHOICE}.{index}"
        known[f"{prefix}.{semconv.RESPONSE_TOKEN_IDS}"] = choice.token_ids
        known[f"{prefix}.{semconv.LOGPROBS}"] = choice.logprobs
        known[f"{prefix}.{semconv.WEIGHT_VERSIONS}"] = choice.weight_versions
        if choice.prompt_token_ids != first.prompt_token_ids:
            known[f"{prefix}.{semconv.PROMPT_TOKEN_IDS}"] = choice.prompt_token_ids
    attributes.update((name, value) for name, value in known.items() if value is not None)
    if choices:
        attributes[semconv.GEN_AI_FINISH_REASONS] = [choice.finish_reason or "" for _, choice in choices]
        text = dump_json([choice.to_message() for _, choice in choices])
        if call.backend is not None:
            text = call.backend.redactor.redact_answer(text)  # a stream may contain the key in pieces
        attributes[semconv.GEN_AI_OUTPUT_MESSAGES] = text.decode()


def _freeze_numbers(values: Any) -> Any:
    """Freezes a list of numbers; returns anything else unchanged.

    Hot path: the sum detects NaN, infinities and integers beyond 64 bits without a check of each value.
    """
    try:
        return FrozenNumbers(values) if type(values) is list and _MIN_INT64 <= sum(values) <= _MAX_INT64 else values
    except TypeError:
        return values
