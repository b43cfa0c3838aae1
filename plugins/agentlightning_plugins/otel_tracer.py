"""``OtelTracer``: records what OpenTelemetry instrumentation of any library sees, each span with its own attempt.

All tracers of a process share one provider, because a library can be instrumented for one only. It is ours, so that no
setting of the environment samples spans away or cuts attributes off. Spans of OpenTelemetry's global provider arrive
too: ours becomes the global one if there is none, else its spans are read beside its own exporters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import StatusCode
from opentelemetry.trace.status import Status

from agentlightning import semconv
from agentlightning.plugins import get_manager
from agentlightning.tracer.tracer import OpenSpan, Trace, Tracer, get_active_trace
from agentlightning.types import Span, TraceStatus
from agentlightning_plugins.thread_pool import carry_traces_into_pools

logger = logging.getLogger("agentlightning")

_MAX_ROUTES: Final = 16384
"""How many traces are remembered (closed ones too, for their late spans), and open spans of foreign traces."""


class OtelTracer(Tracer):
    """The default tracer. Between ``init`` and ``teardown`` the libraries that plugins know are instrumented."""

    def __init__(self, join_global_provider: bool = True) -> None:
        """Makes a tracer.

        Args:
            join_global_provider: whether to record spans made with OpenTelemetry's global provider as well. Ours takes
                its place when the program has set none; the place cannot be given back, so a program that sets its own
                later should say False.
        """
        self.join_global_provider = join_global_provider

    def init(self) -> None:
        _pipeline.acquire(self.join_global_provider)

    def teardown(self) -> None:
        _pipeline.release()

    @contextlib.contextmanager
    def root_context(self, trace: Trace, name: str) -> Iterator[OpenSpan]:
        self.init()
        try:
            with super().root_context(trace, name) as span:
                yield span
        finally:
            _pipeline.router.close_route(trace)
            self.teardown()

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        *,
        is_root: bool = False,
    ) -> OpenSpan:
        """See ``Tracer.start_span``."""
        trace = get_active_trace()
        span = _pipeline.tracer.start_span(
            name,
            context=Context() if is_root else None,
            attributes=attributes,
            start_time=_to_ns(start_time),
        )
        if is_root and trace is not None:
            _pipeline.router.add_route(span.get_span_context().trace_id, trace)
        return _OtelSpan(span, trace)


class _OtelSpan(OpenSpan):
    def __init__(self, span: otel.Span, trace: Trace | None) -> None:
        assert isinstance(span, SdkSpan), "our provider records every span"
        self._span = span
        self._trace = trace

    def active(self) -> contextlib.AbstractContextManager[None]:
        return _use(self._span)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(attributes)

    def record_exception(self, error: BaseException) -> None:
        self._span.record_exception(error)
        self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))

    def end(self, status: TraceStatus | None = None, end_time: float | None = None) -> Span:
        if status is not None and status.status_code != "UNSET":
            self._span.set_status(Status(StatusCode[status.status_code], status.description))
        self._span.end(_to_ns(end_time))
        trace = self._trace
        return Span.from_opentelemetry(
            self._span, trace.rollout_id if trace is not None else "", trace.attempt_id if trace is not None else ""
        )


@contextlib.contextmanager
def _use(span: SdkSpan) -> Iterator[None]:
    with otel.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield


class _Router(SpanProcessor):
    """Gives each span that ends to the trace it belongs to, in microseconds.

    A span belongs to the attempt whose root opened its trace, wherever it runs: a thread that lost the context but was
    given a parent keeps the trace. A span of any other trace belongs where it was started, because a library that opens
    traces of its own still runs in the attempt's context; its descendants follow it.
    """

    def __init__(self) -> None:
        self._by_trace: OrderedDict[int, Trace] = OrderedDict()
        self._by_span: OrderedDict[int, Trace] = OrderedDict()
        self._ids: dict[Trace, int] = {}
        self._lock = threading.Lock()

    def add_route(self, trace_id: int, trace: Trace) -> None:
        """Sends the spans of an OpenTelemetry trace to an attempt's trace."""
        _remember(self._by_trace, trace_id, trace, self._lock)
        self._ids[trace] = trace_id

    def close_route(self, trace: Trace) -> None:
        """Keeps the way to the store for spans that come late, and lets go of the spans in memory."""
        trace_id = self._ids.pop(trace, None)
        if trace_id is not None:
            self._by_trace[trace_id] = trace.for_late_spans()

    def clear(self) -> None:
        """Forgets all traces."""
        with self._lock:
            self._by_trace.clear()
            self._by_span.clear()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        """Remembers where a span of a foreign trace was started."""
        context = span.context
        if context.trace_id in self._by_trace:
            return
        trace = get_active_trace()
        if trace is None and span.parent is not None:
            trace = self._by_span.get(span.parent.span_id)
        if trace is not None:
            _remember(self._by_span, context.span_id, trace, self._lock)

    def on_end(self, span: ReadableSpan) -> None:
        """Passes a span on."""
        context = span.context
        trace = self._by_trace.get(context.trace_id)
        if trace is None:
            trace = self._by_span.pop(context.span_id, None)
            if trace is None:
                return
        trace.add(Span.from_opentelemetry(span, trace.rollout_id, trace.attempt_id))


def _remember(routes: OrderedDict[int, Trace], key: int, trace: Trace, lock: threading.Lock) -> None:
    with lock:
        routes[key] = trace
        while len(routes) > _MAX_ROUTES:
            routes.popitem(last=False)


class _Pipeline:
    """The provider of this process and the instrumentation of libraries for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], object]] = []
        self._joined: TracerProvider | None = None
        self.router = _Router()
        with _without_environment("OTEL_SDK_DISABLED"):  # said to quieten a framework; it would silence us too
            self.provider = TracerProvider(
                sampler=ALWAYS_ON,
                resource=Resource(
                    {
                        SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "agentlightning"),
                        semconv.TRACER_NAME: "otel",
                    }
                ),
                span_limits=SpanLimits(
                    max_attributes=SpanLimits.UNSET,
                    max_events=SpanLimits.UNSET,
                    max_links=SpanLimits.UNSET,
                    max_span_attributes=SpanLimits.UNSET,
                    max_event_attributes=SpanLimits.UNSET,
                    max_link_attributes=SpanLimits.UNSET,
                    max_attribute_length=SpanLimits.UNSET,
                    max_span_attribute_length=SpanLimits.UNSET,
                ),
                shutdown_on_exit=False,
            )
        self.provider.add_span_processor(self.router)
        self.tracer = self.provider.get_tracer("agentlightning")

    def acquire(self, join_global_provider: bool) -> None:
        with self._lock:
            if join_global_provider:
                self._join_global_provider()
            self._users += 1
            if self._users == 1:
                self._undo = [carry_traces_into_pools(), *_instrument(self.provider)]

    def release(self) -> None:
        with self._lock:
            if self._users == 0:
                return
            self._users -= 1
            if self._users == 0:
                while self._undo:
                    self._undo.pop()()
                self.router.clear()

    def _join_global_provider(self) -> None:
        provider = otel.get_tracer_provider()
        if isinstance(provider, otel.ProxyTracerProvider):  # nobody has set one
            otel.set_tracer_provider(self.provider)
        elif provider is not self.provider and provider is not self._joined and isinstance(provider, TracerProvider):
            self._joined = provider
            provider.add_span_processor(self.router)


def _instrument(provider: TracerProvider) -> Iterator[Callable[[], object]]:
    """Has each plugin instrument its libraries; gives the functions that undo it."""
    for implementation in get_manager().hook.instrument.get_hookimpls():
        try:
            undo: Any = implementation.function(*[provider][: len(implementation.argnames)])
        except Exception as error:  # isolation point: one plugin must not keep the others from tracing
            logger.warning("plugin %s could not instrument: %s", implementation.plugin_name, error, exc_info=error)
            continue
        if undo is not None:
            yield undo


@contextlib.contextmanager
def _without_environment(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def _to_ns(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1e9)


_pipeline: Final = _Pipeline()
