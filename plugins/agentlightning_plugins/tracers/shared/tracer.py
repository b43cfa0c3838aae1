"""``OtelTracer``: records the OpenTelemetry spans of any instrumented library, each for its own attempt.

All tracers of a process share one provider (``pipeline``). Spans of OpenTelemetry's global provider are recorded too:
ours becomes the global one if there is none, else a span processor is added to the existing one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode
from opentelemetry.trace.status import Status

from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning.tracer.tracer import OpenSpan, Trace, Tracer, get_active_trace
from agentlightning.types import Span, TraceStatus
from agentlightning_plugins.shared.instrumentation import Undo
from agentlightning_plugins.tracers.shared.context_propagation import current_traceparent
from agentlightning_plugins.tracers.shared.pipeline import TRACER, find_target, instrument_by_plugins, pipeline


class OtelTracer(Tracer):
    """The default tracer. Between ``init`` and ``teardown``, the plugins' hook ``instrument`` is in effect."""

    name: str = TRACER
    """The resource attribute ``agentlightning.tracer.name`` of its spans."""

    def __init__(
        self,
        join_global_provider: bool = True,
        *,
        otlp_endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a tracer.

        Args:
            join_global_provider: whether to record spans of OpenTelemetry's global provider as well. Our provider
                becomes the global one if the program has set none. This cannot be undone, so a program that sets its
                own later should pass False.
            otlp_endpoint: URL of an OTLP/HTTP endpoint, such as Jaeger's, Phoenix's or Langfuse's, which also gets
                the spans; ``/v1/traces`` is added to a URL without a path. Default: the environment
                variable ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its companions. ``""`` disables the export.
            headers: sent to ``otlp_endpoint``, such as ``{"authorization": ...}``.

        Raises:
            ConfigError: ``otlp_endpoint`` is not a URL, or headers are given without it.
            PluginError: the exporter, or the extra of a subclass that is a component, is not installed.
        """
        get_manager().require(f"{type(self).__module__}:{type(self).__qualname__}")
        self.join_global_provider = join_global_provider
        self._target = find_target(otlp_endpoint, headers)

    def init(self) -> None:
        pipeline.acquire(self._source(), self._instrument, self._target, join_global_provider=self.join_global_provider)

    def teardown(self) -> None:
        pipeline.release(self._source(), self._target)

    def get_traceparent(self) -> str | None:
        """Returns W3C's ``traceparent`` of the caller's span, for a header or a child process; None outside attempts.

        Child processes and requests of common HTTP clients carry it automatically.
        """
        return current_traceparent()

    def get_handler(self, name: str) -> Any:
        """See ``Tracer``. The LangChain integration attaches its handler to every run; a second one is harmless."""
        return get_manager().create("handler", name)(pipeline.provider)

    def _source(self) -> Hashable:
        """Returns a key for the effect of ``_instrument``, which tracers with equal keys share."""
        return "plugins"

    def _instrument(self, provider: TracerProvider) -> Iterable[Undo]:
        """Instruments libraries for a provider; returns the functions that undo it."""
        return instrument_by_plugins(provider)

    @contextlib.contextmanager
    def root_context(self, trace: Trace, name: str) -> Iterator[OpenSpan]:
        self.init()
        try:
            with super().root_context(trace, name) as span:
                yield span
        finally:
            pipeline.router.close_route(trace)
            self.teardown()

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        *,
        is_root: bool = False,
    ) -> OpenSpan:
        trace = get_active_trace()
        span = pipeline.tracer.start_span(
            name, context=Context() if is_root else None, attributes=attributes, start_time=_to_ns(start_time)
        )
        if is_root and trace is not None:
            exporter = None if self._target is None else pipeline.exporters.get(self._target)
            pipeline.router.add_route(span.get_span_context().trace_id, trace, exporter)
            if trace.rollout_id:
                span.set_attributes({semconv.ROLLOUT_ID: trace.rollout_id, semconv.ATTEMPT_ID: trace.attempt_id})
        return _OtelSpan(span, trace)


class _OtelSpan(OpenSpan):
    def __init__(self, span: otel.Span, trace: Trace | None) -> None:
        assert isinstance(span, SdkSpan), "our provider records every span"
        self._span = span
        self._trace = trace

    def active(self) -> contextlib.AbstractContextManager[None]:
        return otel.use_span(  # type: ignore[return-value] # yields the span
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(attributes)

    def record_exception(self, error: BaseException) -> None:
        self._span.record_exception(error)
        self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))

    def end(self, status: TraceStatus | None = None, end_time: float | None = None) -> Span:
        if status is not None and status.status_code != "UNSET":
            self._span.set_status(Status(StatusCode[status.status_code], status.description))
        record = pipeline.router.end(self._span, _to_ns(end_time))
        if record is not None:
            return record
        trace = self._trace or Trace()
        return Span.from_opentelemetry(self._span, trace.rollout_id, trace.attempt_id)


def _to_ns(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1e9)
