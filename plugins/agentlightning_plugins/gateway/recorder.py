"""Records how a call ended: in metrics, in the cache of answers, and as a span in the store."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Final

from aiohttp import web
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backends.answer_cache import AnswerCache
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.call import ModelCall, used_tokens
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.gateway.limits import Admission, UsageTracker
from agentlightning_plugins.gateway.span import call_to_span
from agentlightning_plugins.shared.web.metrics import ScrapedMetrics

logger = logging.getLogger("agentlightning")
_LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NO_MODEL: Final = ""
"""The label for names that are not models of this gateway: agents must not be able to create metrics."""


class GatewayMetrics(ScrapedMetrics):
    """The metrics of one gateway server."""

    def __init__(
        self,
        models: ModelTable,
        admission: Admission,
        writer: SpanWriter,
        running: Iterable[ModelCall],
    ) -> None:
        """Creates the metrics; the gauges are read from the arguments at each scrape."""
        super().__init__()
        self._models = models
        self._admission = admission
        self._writer = writer
        self._running = running
        registry = self.registry
        self._calls = Counter(
            "agl_gateway_calls_total", "Calls answered or abandoned.", ["model", "status"], registry=registry
        )
        self._latency = Histogram(
            "agl_gateway_call_seconds",
            "Time from the arrival of a call to the end of its answer.",
            ["model"],
            registry=registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self._first_token = Histogram(
            "agl_gateway_first_token_seconds",
            "Time from the arrival of a call to the first bytes of its stream.",
            ["model"],
            registry=registry,
            buckets=_LATENCY_BUCKETS_S,
        )
        self._tokens = Counter(
            "agl_gateway_tokens_total", "Tokens of answered calls.", ["model", "kind"], registry=registry
        )
        self._incomplete = Counter(
            "agl_gateway_incomplete_total", "Calls whose answer did not arrive in full.", ["model"], registry=registry
        )

    def count(self, call: ModelCall, status: str) -> None:
        """Counts a call that has ended."""
        model = call.model if call.backend is not None else _NO_MODEL
        self._calls.labels(model, status).inc()
        self._latency.labels(model).observe(call.end_time - call.start_time)
        if call.first_time:
            self._first_token.labels(model).observe(call.first_time - call.start_time)
        if not call.is_complete:
            self._incomplete.labels(model).inc()
        input_tokens, output_tokens = used_tokens(call)
        if input_tokens or output_tokens:
            self._tokens.labels(model, "input").inc(input_tokens)
            self._tokens.labels(model, "output").inc(output_tokens)

    def refuse(self, status: int) -> None:
        """Counts a request that was refused before it became a call."""
        self._calls.labels(_NO_MODEL, status).inc()

    async def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return await self.render_with(self._read_gauges())

    def _read_gauges(self) -> Iterator[GaugeMetricFamily]:
        admission, writer = self._admission, self._writer
        yield GaugeMetricFamily("agl_gateway_in_flight", "Calls in flight.", admission.in_flight)
        yield GaugeMetricFamily("agl_gateway_waiting", "Calls that wait for the end of a pause.", admission.waiting)
        yield GaugeMetricFamily("agl_gateway_paused", "1 while new calls wait.", admission.is_paused)
        version = GaugeMetricFamily("agl_gateway_weight_version", "Version of the weights that serve calls.", labels=[])
        if admission.weight_version is not None:
            version.add_metric([], admission.weight_version)
        yield version
        labels = ["model", "backend"]
        up = GaugeMetricFamily("agl_gateway_backend_up", "1 if the backend is up.", labels=labels)
        in_flight = GaugeMetricFamily("agl_gateway_backend_in_flight", "Calls at a backend.", labels=labels)
        counts = count_by_backend(self._running)
        for backend in self._models.backends:
            up.add_metric([backend.model, backend.label], backend.is_up)
            in_flight.add_metric([backend.model, backend.label], counts[backend.identity])
        yield up
        yield in_flight
        yield GaugeMetricFamily("agl_gateway_span_queue", "Spans on their way to the store.", writer.queued)
        yield GaugeMetricFamily("agl_gateway_spans_dropped", "Spans lost so far.", writer.lost)


def count_by_backend(calls: Iterable[ModelCall]) -> collections.Counter[bytes]:
    """Returns the number of running calls of each backend, by the backend's identity."""
    return collections.Counter(call.backend.identity for call in calls if call.backend is not None)


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
