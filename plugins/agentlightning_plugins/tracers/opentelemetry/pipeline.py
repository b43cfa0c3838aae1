"""The OpenTelemetry provider of this process: one for all tracers, because a library can be instrumented for one only.

It is ours, so that no setting of the environment samples spans away or cuts attributes off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agentlightning import semconv
from agentlightning.plugin.registry import get_manager
from agentlightning.tracer.tracer import Trace, get_active_trace
from agentlightning.types import Span
from agentlightning_plugins.tracers.opentelemetry.context_propagation import carry_context_out
from agentlightning_plugins.tracers.opentelemetry.otlp_export import Exporters, Target
from agentlightning_plugins.tracers.opentelemetry.thread_pool import carry_traces_into_pools

logger = logging.getLogger("agentlightning")

Undo = Callable[[], object]
Instrument = Callable[[TracerProvider], Iterable[Undo]]

_MAX_ROUTES: Final = 16384
"""How many traces are remembered (closed ones too, for their late spans), and open spans of foreign traces."""


class _Route(NamedTuple):
    """Where the spans of a trace go."""

    trace: Trace
    exporter: SpanProcessor | None
    """Takes them to an OTLP endpoint besides."""


class Router(SpanProcessor):
    """Gives each span that ends to the trace it belongs to, in microseconds.

    A span belongs to the attempt whose root opened its trace, wherever it runs: a thread that lost the context but was
    given a parent keeps the trace. A span of any other trace belongs where it was started, because a library that opens
    traces of its own still runs in the attempt's context; its descendants follow it.
    """

    def __init__(self) -> None:
        self._by_trace: OrderedDict[int, _Route] = OrderedDict()
        self._by_span: OrderedDict[int, _Route] = OrderedDict()
        self._opened: dict[Trace, tuple[int, _Route]] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def add_route(self, trace_id: int, trace: Trace, exporter: SpanProcessor | None = None) -> None:
        """Sends the spans of an OpenTelemetry trace to an attempt's trace, and to an exporter."""
        route = _Route(trace, exporter)
        _remember(self._by_trace, trace_id, route, self._lock)
        self._opened[trace] = trace_id, route

    def close_route(self, trace: Trace) -> None:
        """Keeps the way to the store for spans that come late, and lets go of the spans in memory."""
        trace_id, route = self._opened.pop(trace, (None, None))
        if trace_id is not None and route is not None:
            self._by_trace[trace_id] = _Route(trace.for_late_spans(), route.exporter)

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
        opened = self._opened.get(trace) if trace is not None else None
        if opened is not None:
            route: _Route | None = opened[1]
        elif trace is not None:
            route = _Route(trace, None)
        else:
            route = self._by_span.get(span.parent.span_id) if span.parent is not None else None
        if route is not None:
            _remember(self._by_span, context.span_id, route, self._lock)

    def take_last(self) -> Span | None:
        """What ``on_end`` passed on last in this thread; None when asked again."""
        last: Span | None = self._local.__dict__.pop("last", None)
        return last

    def on_end(self, span: ReadableSpan) -> None:
        """Passes a span on."""
        context = span.context
        route = self._by_trace.get(context.trace_id)
        if route is None:
            route = self._by_span.pop(context.span_id, None)
            if route is None:
                return
        trace, exporter = route
        self._local.last = record = Span.from_opentelemetry(span, trace.rollout_id, trace.attempt_id)
        trace.add(record)
        if exporter is not None:
            exporter.on_end(span)


def _remember(routes: OrderedDict[int, _Route], key: int, route: _Route, lock: threading.Lock) -> None:
    with lock:
        routes[key] = route
        while len(routes) > _MAX_ROUTES:
            routes.popitem(last=False)


class _Source(NamedTuple):
    """Libraries instrumented for the sake of some tracers."""

    users: int
    undo: list[Undo]


class Pipeline:
    """The provider of this process and the instrumentation of libraries for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is instrumented may import what is instrumented
        self._users = 0
        self._undo: list[Undo] = []
        self._sources: dict[Hashable, _Source] = {}
        self._joined: TracerProvider | None = None
        self.router = Router()
        self.exporters = Exporters()
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

    def acquire(
        self, source: Hashable, instrument: Instrument, target: Target | None, *, join_global_provider: bool
    ) -> None:
        """Prepares the process for a tracer; each call is undone by one ``release`` of the same source and target.

        Args:
            source: tracers that name the same one share what ``instrument`` did.
            instrument: switches libraries on and gives what undoes it.
            target: where spans are exported to as well.
            join_global_provider: whether spans of the global provider are recorded.
        """
        with self._lock:
            if join_global_provider:
                self._join_global_provider()
            self._users += 1
            if self._users == 1:
                self._undo = [carry_traces_into_pools(), carry_context_out()]
            users, undo = self._sources.get(source) or _Source(0, [])
            self._sources[source] = _Source(users + 1, undo)
            if not users:
                undo.extend(instrument(self.provider))
            if target is not None:
                self.exporters.acquire(target)

    def release(self, source: Hashable, target: Target | None) -> None:
        """Undoes one ``acquire``; the last one leaves the process as it was."""
        with self._lock:
            used = self._sources.pop(source, None)
            if used is None:
                return
            if used.users > 1:
                self._sources[source] = used._replace(users=used.users - 1)
            else:
                _run_backwards(used.undo)
            self._users -= 1
            if self._users == 0:
                _run_backwards(self._undo)
                self.router.clear()
        if target is not None:
            self.exporters.release(target)

    def _join_global_provider(self) -> None:
        provider = otel.get_tracer_provider()
        if isinstance(provider, otel.ProxyTracerProvider):  # nobody has set one
            otel.set_tracer_provider(self.provider)
        elif provider is not self.provider and provider is not self._joined and isinstance(provider, TracerProvider):
            self._joined = provider
            provider.add_span_processor(self.router)


def instrument_by_plugins(provider: TracerProvider) -> Iterator[Undo]:
    """Has each plugin instrument its libraries; gives the functions that undo it."""
    for implementation in get_manager().hook.instrument.get_hookimpls():
        try:
            undo: Any = implementation.function(*[provider][: len(implementation.argnames)])
        except Exception as error:  # isolation point: one plugin must not keep the others from tracing
            logger.warning("plugin %s could not instrument: %s", implementation.plugin_name, error, exc_info=error)
            continue
        if undo is not None:
            yield undo


def _run_backwards(undo: list[Undo]) -> None:
    while undo:
        undo.pop()()


@contextlib.contextmanager
def _without_environment(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


pipeline: Final = Pipeline()
