"""What the gateway counts, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backends.backend import ModelTable
from agentlightning_plugins.gateway.limits.admission import Admission
from agentlightning_plugins.gateway.recording.call import Call, used_tokens
from agentlightning_plugins.prometheus import Labels, Registry

_NO_MODEL: Final = ""
"""The label of what names no model of ours: agents must not be able to make metrics."""


class GatewayMetrics:
    """The metrics of one gateway server."""

    def __init__(
        self,
        models: Callable[[], ModelTable],
        admission: Admission,
        writer: SpanWriter,
        running: Callable[[], Iterable[Call]],
    ) -> None:
        """Makes the metrics; what is given is read when they are rendered."""
        registry = Registry()
        self.render: Final = registry.render
        self._models = models
        self._running = running
        self._calls = registry.counter("agl_gateway_calls_total", "Calls answered or given up.", "model", "status")
        self._latency = registry.histogram(
            "agl_gateway_call_seconds", "From the arrival of a call to the end of its answer.", "model"
        )
        self._first_token = registry.histogram(
            "agl_gateway_first_token_seconds", "From the arrival of a call to the first bytes of its stream.", "model"
        )
        self._tokens = registry.counter("agl_gateway_tokens_total", "Tokens of answered calls.", "model", "kind")
        self._incomplete = registry.counter(
            "agl_gateway_incomplete_total", "Calls whose answer did not arrive whole.", "model"
        )
        registry.gauge("agl_gateway_in_flight", "Calls under way.", read=lambda: [((), admission.in_flight)])
        registry.gauge(
            "agl_gateway_waiting", "Calls that wait for the end of a pause.", read=lambda: [((), admission.waiting)]
        )
        registry.gauge("agl_gateway_paused", "1 while new calls wait.", read=lambda: [((), float(admission.is_paused))])
        registry.gauge(
            "agl_gateway_weight_version",
            "Of the weights that calls get.",
            read=lambda: _known(admission.weight_version),
        )
        registry.gauge("agl_gateway_backend_up", "1 if it answers.", "model", "backend", read=self._read_up)
        registry.gauge(
            "agl_gateway_backend_in_flight", "Calls at a backend.", "model", "backend", read=self._read_in_flight
        )
        registry.gauge("agl_gateway_span_queue", "Spans on their way to the store.", read=lambda: [((), writer.queued)])
        registry.gauge("agl_gateway_spans_dropped", "Spans that were lost so far.", read=lambda: [((), writer.lost)])

    def count(self, call: Call, status: str) -> None:
        """Takes in a call that has ended."""
        model = call.model if call.backend is not None else _NO_MODEL
        self._calls.add(model, status)
        self._latency.observe(model, value=call.end_time - call.start_time)
        if call.first_time:
            self._first_token.observe(model, value=call.first_time - call.start_time)
        if not call.is_complete:
            self._incomplete.add(model)
        input_tokens, output_tokens = used_tokens(call)
        if input_tokens or output_tokens:
            self._tokens.add(model, "input", value=input_tokens)
            self._tokens.add(model, "output", value=output_tokens)

    def refuse(self, status: int) -> None:
        """Counts a call that never became one."""
        self._calls.add(_NO_MODEL, str(status))

    def _read_up(self) -> list[tuple[Labels, float]]:
        return [((backend.model, backend.endpoint), float(backend.is_up)) for backend in self._models().backends]

    def _read_in_flight(self) -> list[tuple[Labels, float]]:
        counts = count_by_backend(self._running())
        return [((b.model, b.endpoint), counts[b.identity]) for b in self._models().backends]


def count_by_backend(calls: Iterable[Call]) -> Counter[bytes]:
    """How many calls are at each backend, by its identity."""
    return Counter(call.backend.identity for call in calls if call.backend is not None)


def _known(value: int | None) -> list[tuple[Labels, float]]:
    return [] if value is None else [((), value)]
