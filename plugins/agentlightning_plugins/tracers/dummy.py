"""``DummyTracer``: records emitters and operations only, not frameworks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from agentlightning import semconv
from agentlightning.frozen import freeze_attributes
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.tracer.tracer import OpenSpan, Trace, Tracer, exception_attributes, get_active_trace
from agentlightning.types import Span, SpanEvent, TraceStatus

_parent: ContextVar[_DummySpan | None] = ContextVar("agentlightning_dummy_parent", default=None)


class DummyTracer(Tracer):
    """Records emitters and operations without OpenTelemetry, for tests and simple agents."""

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        *,
        is_root: bool = False,
    ) -> OpenSpan:
        parent = None if is_root else _parent.get()
        trace = get_active_trace()
        span = _DummySpan(name, dict(attributes or {}), start_time, parent, trace)
        if trace is not None and not is_root:
            trace.start(span.span_id, span.end_unfinished)
        return span


class _DummySpan(OpenSpan):
    def __init__(
        self,
        name: str,
        attributes: dict[str, Any],
        start_time: float | None,
        parent: _DummySpan | None,
        trace: Trace | None,
    ) -> None:
        self.trace_id: str = os.urandom(16).hex() if parent is None else parent.trace_id
        self.span_id: str = os.urandom(8).hex()
        self._name = name
        self._attributes = attributes
        self._start_time = time.time() if start_time is None else start_time
        self._parent_id = None if parent is None else parent.span_id
        self._trace = trace
        self._events: list[SpanEvent] = []
        self._status: TraceStatus | None = None
        self._ended: Span | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        token = _parent.set(self)
        try:
            yield
        finally:
            _parent.reset(token)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._attributes.update(attributes)

    def record_exception(self, error: BaseException) -> None:
        self._events.append(SpanEvent(name="exception", attributes=exception_attributes(error), timestamp=time.time()))
        self._status = TraceStatus(status_code="ERROR", description=f"{type(error).__name__}: {error}")

    def end_unfinished(self) -> None:
        self._attributes[semconv.UNFINISHED] = True
        self.end()

    def end(self, status: TraceStatus | None = None, end_time: float | None = None) -> Span:
        if self._ended is not None:
            return self._ended
        trace = self._trace
        self._ended = Span(
            rollout_id="" if trace is None else trace.rollout_id,
            attempt_id="" if trace is None else trace.attempt_id,
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_id=self._parent_id,
            name=self._name,
            status=status or self._status or TraceStatus(),
            attributes=freeze_attributes(self._attributes),
            events=self._events,
            start_time=self._start_time,
            end_time=max(self._start_time, time.time()) if end_time is None else end_time,
        )
        if trace is not None:
            trace.add(self._ended)
        return self._ended


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_plugins.tracers.dummy:DummyTracer"
    return [Component("tracer", "dummy", target, summary="records only what the agent emits")]
