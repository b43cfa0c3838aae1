"""The last step of a call: it is counted, its answer is kept for later calls, and its span goes to the store."""

from __future__ import annotations

import logging
import time
from typing import Final

from aiohttp import web

from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backends.answer_cache import AnswerCache
from agentlightning_plugins.gateway.call import ModelCall, used_tokens
from agentlightning_plugins.gateway.limits.usage import UsageTracker
from agentlightning_plugins.gateway.recording.metric import GatewayMetrics
from agentlightning_plugins.gateway.recording.span import call_to_span
from agentlightning_plugins.gateway.refusal import CallRefused

logger = logging.getLogger("agentlightning")
_STORE_WAIT_S: Final = 1.0
"""How long an answer may wait until its call is stored."""
_DISCONNECTED: Final = 499
"""As in nginx; for the metrics only."""


class CallRecorder:
    """Records the calls of one gateway."""

    def __init__(
        self,
        store: LightningStore,
        writer: SpanWriter,
        usage: UsageTracker,
        metrics: GatewayMetrics,
        cache: AnswerCache | None,
    ) -> None:
        self._store = store
        self._writer = writer
        self._usage = usage
        self._metrics = metrics
        self._cache = cache
        self._warned: set[str] = set()

    def finish(self, call: ModelCall, status: int, error: str | None = None) -> None:
        """Counts a finished call and passes it to the span writer, once.

        Must be called before the agent gets the end of its answer: a flush after an answer must include its span.
        """
        if call.end_time:
            return
        call.end_time = time.time()
        call.error = call.error or error
        if self._cache is not None:
            self._cache.keep(call)
        self._metrics.count(call, str(status))
        if call.attempt is None:
            return
        if call.backend is not None:
            tokens, price = used_tokens(call), call.backend.price
            self._usage.add(call.attempt, sum(tokens), price.cost(*tokens) if price is not None else 0.0)
        self._writer.put(call_to_span(call))
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

    async def store(self, call: ModelCall) -> None:
        """Waits, for a limited time, until a durable store contains a finished call.

        The agent gets the end of its answer afterwards, so the store has all calls of a rollout that has succeeded,
        even if this process is killed.
        """
        if call.attempt is not None and self._store.capabilities["durable"]:
            await self._writer.flush(*call.attempt, timeout_s=_STORE_WAIT_S)

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
