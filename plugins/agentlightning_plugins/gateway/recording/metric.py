"""Prometheus metrics of the gateway."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.call import ModelCall, used_tokens
from agentlightning_plugins.gateway.limits.admission import Admission
from agentlightning_plugins.shared.web.metrics import ScrapedMetrics

_LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_NO_MODEL: Final = ""
"""The label for names that are not models of this gateway: agents must not be able to create metrics."""


class GatewayMetrics(ScrapedMetrics):
    """The metrics of one gateway server."""

    def __init__(
        self,
        models: Callable[[], ModelTable],
        admission: Admission,
        writer: SpanWriter,
        running: Callable[[], Iterable[ModelCall]],
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
        counts = count_by_backend(self._running())
        for backend in self._models().backends:
            up.add_metric([backend.model, backend.label], backend.is_up)
            in_flight.add_metric([backend.model, backend.label], counts[backend.identity])
        yield up
        yield in_flight
        yield GaugeMetricFamily("agl_gateway_span_queue", "Spans on their way to the store.", writer.queued)
        yield GaugeMetricFamily("agl_gateway_spans_dropped", "Spans lost so far.", writer.lost)


def count_by_backend(calls: Iterable[ModelCall]) -> collections.Counter[bytes]:
    """Returns the number of running calls of each backend, by the backend's identity."""
    return collections.Counter(call.backend.identity for call in calls if call.backend is not None)
