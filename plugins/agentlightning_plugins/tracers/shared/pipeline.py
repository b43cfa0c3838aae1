"""The OpenTelemetry provider of this process: one for all tracers, because a library can be instrumented only once.

It ignores environment variables except for the service name, so that none drops spans or truncates attributes.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 # a forked child resets its locks before a provider uses them
import functools
import importlib.util
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from agentlightning import semconv
from agentlightning.errors import ConfigError, PluginError, install_command
from agentlightning.frozen import FrozenDict
from agentlightning.plugin.registry import get_manager
from agentlightning.tracer.tracer import Trace, get_active_trace
from agentlightning.types import Span
from agentlightning_plugins.shared.instrumentation import Undo
from agentlightning_plugins.tracers.shared.context_propagation import propagate_context

logger = logging.getLogger("agentlightning")

_DISTRIBUTION: Final = "opentelemetry-exporter-otlp-proto-http"
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MAX_QUEUED: Final = 16384
"""Spans that may wait for a slow endpoint. The exporter drops further ones with a warning; the store keeps them."""
_MAX_SHUTDOWN_S: Final = 5.0
TRACER: Final = "otel"
"""The name of the tracer whose provider all tracers of the process share."""


class Target(NamedTuple):
    """An OTLP endpoint."""

    endpoint: str | None
    """None: OpenTelemetry's own environment variables name it."""
    headers: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Target({self.endpoint!r}, {len(self.headers)} headers)"  # headers hold keys


def find_target(endpoint: str | None, headers: Mapping[str, str] | None) -> Target | None:
    """Finds the endpoint that gets spans in addition to the store: the given one, else the environment's, else None.

    Raises:
        ConfigError: ``endpoint`` is not a URL, or headers are given without it.
        PluginError: the exporter is not installed.
    """
    if endpoint:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise ConfigError(
                f"otlp_endpoint = {endpoint!r}: give an http(s) URL such as http://127.0.0.1:4318/v1/traces"
            )
        if url.path in ("", "/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        if not _is_installed():
            raise PluginError(f"otlp_endpoint needs {_DISTRIBUTION}. Install with: {install_command('otlp')}")
        return Target(endpoint, tuple(sorted((headers or {}).items())))
    if headers:
        raise ConfigError("headers are sent to otlp_endpoint: give otlp_endpoint too")
    variable = next((name for name in _VARIABLES if os.environ.get(name)), None)
    if endpoint is not None or variable is None:
        return None
    if not _is_installed():
        logger.warning("%s is set, but spans are not exported: %s", variable, install_command("otlp"))
        return None
    return Target(None)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def open_exporter(target: Target) -> SpanProcessor:
    """Creates an exporter, which sends in its own thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=target.endpoint, headers=dict(target.headers) or None)
    return BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED, schedule_delay_millis=500)


def close_exporter(exporter: SpanProcessor) -> None:
    """Sends the remaining spans, for a few seconds at most."""
    # BatchSpanProcessor.shutdown takes no timeout, and its exporter may retry for a minute.
    closing = threading.Thread(target=exporter.shutdown, name="agl-otlp-shutdown", daemon=True)
    closing.start()
    closing.join(_MAX_SHUTDOWN_S)
    if closing.is_alive():
        logger.warning("the OTLP endpoint did not take the last spans in time; the store has them")


Instrument = Callable[[TracerProvider], Iterable[Undo]]

_MAX_ROUTES: Final = 16384
"""Limit of the known traces (closed ones for their late spans), and of the open spans of foreign traces."""
_LIMITS: Final = """
    attributes events links span_attributes event_attributes link_attributes attribute_length span_attribute_length
""".split()
_CONTEXT_PROPAGATION: Final = "context propagation"


class _Route(NamedTuple):
    """The destinations of a trace's spans."""

    trace: Trace
    exporter: SpanProcessor | None
    """Exporter that sends the spans to an OTLP endpoint as well."""


class Router(SpanProcessor):
    """Adds each span that ends to the trace of its attempt. This takes microseconds.

    A span belongs to the attempt whose root opened its OpenTelemetry trace, wherever it runs: a thread that lost the
    context but was given a parent keeps the trace. A span of any other trace belongs to the attempt it was started in,
    because a library that opens its own traces still runs in the attempt's context; its descendants follow it.
    """

    def __init__(self) -> None:
        self._by_trace: OrderedDict[int, _Route] = OrderedDict()
        self._by_span: OrderedDict[int, _Route] = OrderedDict()
        self._opened: dict[Trace, tuple[int, _Route]] = {}
        self._lock = threading.Lock()
        self._ending: dict[int, Span | None] = {}
        """Records of the spans that ``end`` is ending, by span id; None before it is made."""

    def add_route(self, trace_id: int, trace: Trace, exporter: SpanProcessor | None = None) -> None:
        route = _Route(trace, exporter)
        _remember(self._by_trace, trace_id, route, self._lock)
        self._opened[trace] = trace_id, route

    def close_route(self, trace: Trace) -> None:
        """Releases the spans in memory; late spans still go to the store."""
        trace_id, route = self._opened.pop(trace, (None, None))
        if trace_id is not None and route is not None:
            self._by_trace[trace_id] = _Route(trace.for_late_spans(), route.exporter)

    def clear(self) -> None:
        with self._lock:
            self._by_trace.clear()
            self._by_span.clear()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        """Notes an open span of an attempt, and the attempt in which a span of a foreign trace was started."""
        context = span.context
        route = self._by_trace.get(context.trace_id)
        if route is None:
            trace = get_active_trace()
            if trace is not None:
                if trace not in self._opened:
                    _remember(self._by_span, context.span_id, _Route(trace, None), self._lock)
                    return  # its root, or it is closed
                route = self._opened[trace][1]
            elif span.parent is not None:
                route = self._by_span.get(span.parent.span_id)
            if route is None:
                return
            _remember(self._by_span, context.span_id, route, self._lock)
        route.trace.start(f"{context.span_id:016x}", functools.partial(_end_unfinished, span))

    def end(self, span: SdkSpan, end_time: int | None = None) -> Span | None:
        """Ends a span, now or at ``end_time`` (ns); returns its record, or None if it belongs to no attempt."""
        self._ending[span.context.span_id] = None
        span.end(end_time)
        return self._ending.pop(span.context.span_id)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        # Also of a root, which has started before its route is known.
        started_in = self._by_span.pop(context.span_id, None)
        route = self._by_trace.get(context.trace_id, started_in)
        if route is None:
            return
        trace, exporter = route
        record = Span.from_opentelemetry(span, trace.rollout_id, trace.attempt_id)
        name = getattr(trace.tracer, "name", TRACER)
        if name != TRACER and semconv.TRACER_NAME in record.resource.attributes:
            attributes = FrozenDict({**record.resource.attributes, semconv.TRACER_NAME: name})
            resource = record.resource.model_copy(update={"attributes": attributes})
            record = record.model_copy(update={"resource": resource})
        if context.span_id in self._ending:
            self._ending[context.span_id] = record
        trace.add(record)
        if exporter is not None:
            exporter.on_end(span)


def _end_unfinished(span: SdkSpan) -> None:
    span.set_attribute(semconv.UNFINISHED, True)
    span.end()


def _remember(routes: OrderedDict[int, _Route], key: int, route: _Route, lock: threading.Lock) -> None:
    with lock:
        routes[key] = route
        while len(routes) > _MAX_ROUTES:
            routes.popitem(last=False)


class Pipeline:
    """The provider of this process and the instrumentation of libraries for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # instrumenting one library may import another that is instrumented
        self._sources: dict[Hashable, tuple[int, list[Undo]]] = {}
        """Number of users of each source, and the functions that undo it."""
        self._joined: TracerProvider | None = None
        self.router = Router()
        self.exporters: dict[Target, SpanProcessor] = {}
        is_disabled = os.environ.pop("OTEL_SDK_DISABLED", None)  # it would disable our provider too
        self.provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource(
                {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "agentlightning"), semconv.TRACER_NAME: TRACER}
            ),
            span_limits=SpanLimits(**{f"max_{name}": SpanLimits.UNSET for name in _LIMITS}),
            shutdown_on_exit=False,
        )
        if is_disabled is not None:
            os.environ["OTEL_SDK_DISABLED"] = is_disabled
        self.provider.add_span_processor(self.router)
        self.tracer = self.provider.get_tracer("agentlightning")

    def acquire(
        self, source: Hashable, instrument: Instrument, target: Target | None, *, join_global_provider: bool
    ) -> None:
        """Prepares the process for a tracer; each call is undone by one ``release`` of the same source and target.

        Tracers with the same source share one call of ``instrument``, which returns the functions that undo it.
        """
        with self._lock:
            if join_global_provider:
                self._join_global_provider()
            self._acquire(_CONTEXT_PROPAGATION, propagate_context)
            self._acquire(source, lambda: instrument(self.provider))
            if target is not None:
                self._acquire(target, lambda: [self._open_exporter(target)])

    def release(self, source: Hashable, target: Target | None) -> None:
        """Undoes one ``acquire``; the last one leaves the process as it was."""
        with self._lock:
            if source not in self._sources:
                return
            closing = [] if target is None else self._release(target)
            for undo in [*self._release(source), *self._release(_CONTEXT_PROPAGATION)]:
                undo()
            if not self._sources:
                self.router.clear()
        for close in closing:  # without the lock: it may take seconds
            close()

    def _acquire(self, source: Hashable, instrument: Callable[[], Iterable[Undo]]) -> None:
        users, undo = self._sources.get(source, (0, []))
        self._sources[source] = users + 1, undo
        if not users:
            undo.extend(instrument())

    def _release(self, source: Hashable) -> list[Undo]:
        """Removes one user; after the last one, returns the functions that undo the source."""
        users, undo = self._sources.pop(source)
        if users == 1:
            return undo[::-1]
        self._sources[source] = users - 1, undo
        return []

    def _open_exporter(self, target: Target) -> Undo:
        exporter = self.exporters[target] = open_exporter(target)
        return functools.partial(close_exporter, exporter)

    def _join_global_provider(self) -> None:
        provider = otel.get_tracer_provider()
        if isinstance(provider, otel.ProxyTracerProvider):  # the program has set none
            otel.set_tracer_provider(self.provider)
        elif provider is not self.provider and provider is not self._joined and isinstance(provider, TracerProvider):
            self._joined = provider
            provider.add_span_processor(self.router)


def instrument_by_plugins(provider: TracerProvider) -> Iterator[Undo]:
    """Calls the hook ``instrument`` of every plugin; yields the functions that undo it."""
    for implementation in get_manager().hook.instrument.get_hookimpls():
        try:
            undo: Any = implementation.function(*[provider][: len(implementation.argnames)])
        except Exception as error:  # isolation point: one plugin must not keep another from tracing
            logger.warning("plugin %s could not instrument: %s", implementation.plugin_name, error, exc_info=error)
            continue
        if undo is not None:
            yield undo


pipeline: Final = Pipeline()
