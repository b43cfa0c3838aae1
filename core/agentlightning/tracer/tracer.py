"""``Tracer``: opens a trace for each attempt and delivers its spans to the store."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel

from agentlightning import semconv
from agentlightning.errors import ConfigError, PluginError, format_error
from agentlightning.frozen import freeze_attributes
from agentlightning.records import Span, TraceStatus
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter


class Trace:
    """The ended spans of one attempt. Made and filled by ``trace_context``."""

    def __init__(self, rollout_id: str = "", attempt_id: str = "", writer: SpanWriter | None = None) -> None:
        """Starts a trace; the ids are empty outside rollouts, and without a writer the spans are kept here only."""
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.tracer: Tracer | None = None
        self._writer = writer
        self._spans: list[Span] = []
        self._started: dict[str, Callable[[], object]] = {}
        """For each span that is still open, by its id, the function that ends it."""
        self._is_open = True
        self._undelivered = 0

    @property
    def store(self) -> LightningStore | None:
        """The store that receives the spans, if any."""
        return None if self._writer is None else self._writer.store

    @property
    def spans(self) -> list[Span]:
        """Spans that ended before the trace was closed, in the order of their ends; the root span is the last."""
        return list(self._spans)

    @property
    def dropped(self) -> int:
        """Number of spans that did not reach the store, without late ones; final once the trace is delivered."""
        if self._writer is None or not self._is_open:
            return self._undelivered
        return self._writer.dropped(self.rollout_id, self.attempt_id)

    def start(self, span_id: str, end: Callable[[], object]) -> None:
        """Notes a started span, from any thread; ``end_started`` calls ``end`` unless the span is added before."""
        if self._is_open:
            self._started[span_id] = end

    def end_started(self) -> None:
        """Ends the spans that are still open, the last one first; their ``end`` marks them as ``UNFINISHED``."""
        while self._started:
            with contextlib.suppress(KeyError):  # another thread has just ended the last one
                self._started.popitem()[1]()

    def add(self, span: Span) -> None:
        """Adds an ended span, from any thread, without waiting. A closed trace passes it only to the store, as late."""
        self._started.pop(span.span_id, None)
        is_open = self._is_open
        if not is_open:
            span = span.model_copy(update={"attributes": freeze_attributes({**span.attributes, semconv.LATE: True})})
        is_taken = self._writer is None or self._writer.put(span)
        if is_taken and is_open:
            self._spans.append(span)

    def for_late_spans(self) -> Trace:
        """Returns a closed trace of the same attempt, which only forwards spans."""
        late = Trace(self.rollout_id, self.attempt_id, self._writer)
        late.tracer, late._is_open = self.tracer, False
        return late

    def close(self) -> None:
        """Makes later spans late ones."""
        self._is_open = False

    async def deliver(self, timeout_s: float) -> None:
        """Closes the trace, and waits until its spans are stored, or the time is up."""
        self.close()
        if self._writer is not None:
            ids = self.rollout_id, self.attempt_id
            is_done = await self._writer.flush(*ids, timeout_s=timeout_s)
            self._undelivered = self._writer.dropped(*ids) if is_done else self._writer.undelivered(*ids)


class OpenSpan(ABC):
    """A started span. The code that starts it must end it, in any thread."""

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Makes this span the parent of spans started inside; can be entered repeatedly."""

    @abstractmethod
    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Adds attributes: scalars and lists of scalars."""

    @abstractmethod
    def record_exception(self, error: BaseException) -> None:
        """Adds the exception as an event and marks the span as failed."""

    @abstractmethod
    def end(self, status: TraceStatus | None = None, end_time: float | None = None) -> Span:
        """Ends the span, now or at ``end_time``, and returns it."""


_active: ContextVar[Trace | None] = ContextVar("agentlightning_active_trace", default=None)
_last_trace: ContextVar[Trace | None] = ContextVar("agentlightning_last_trace", default=None)


def get_active_tracer() -> Tracer | None:
    """Returns the tracer whose ``trace_context`` the caller runs in, also in threads and tasks with its context."""
    trace = _active.get()
    return None if trace is None else trace.tracer


def get_active_trace() -> Trace | None:
    """Returns the trace that the caller runs in."""
    return _active.get()


@contextlib.contextmanager
def activate(trace: Trace | None) -> Iterator[None]:
    """Makes a trace the active trace of the block; None means no trace."""
    token = _active.set(trace)
    try:
        yield
    finally:
        _active.reset(token)


class Tracer(ABC):
    """Records agents. A subclass implements ``start_span``.

    One tracer serves many attempts concurrently; a context variable holds the attempt of each caller. Instances can
    be pickled until their first ``init_worker``.
    """

    delivery_timeout_s: float = 30.0
    """How long the end of an attempt waits for its spans to be stored; the rest counts as dropped."""

    def init(self) -> None:  # noqa: B027 # most tracers have nothing to set up
        """Sets the process up for tracing; ``teardown`` undoes one call."""

    def teardown(self) -> None:  # noqa: B027 # see init
        """Undoes one call of ``init``; the last call restores the process."""

    def init_worker(self, worker_id: int | str, store: LightningStore | None = None) -> None:
        """Prepares for the attempts of one runner; ``store`` is the default of ``trace_context``."""
        if worker_id in self._writers:
            raise ConfigError(f"worker {worker_id!r} is set up already; call teardown_worker({worker_id!r}) first")
        self._writers[worker_id] = None if store is None else SpanWriter.shared(store)

    def teardown_worker(self, worker_id: int | str) -> None:
        """Delivers a worker's remaining spans; ignores unknown workers."""
        writer = self._writers.pop(worker_id, None)
        if writer is not None:
            writer.release()

    def trace_context(
        self,
        name: str | None = None,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        store: LightningStore | None = None,
    ) -> TraceScope:
        """Opens the trace of one attempt; everything inside belongs to it, including tasks and threads.

        Leaving it ends the spans that are still open and the root span, which is called ``name``, with the exception if
        there is one, and waits until they are in ``store``, by default the store of ``init_worker``. ``with`` waits in
        this thread, so coroutines use ``async with``. Without ids the spans stay in the trace; a single id raises
        ConfigError.
        """
        if bool(rollout_id) != bool(attempt_id):
            raise ConfigError(f"give rollout_id and attempt_id together, got {rollout_id!r} and {attempt_id!r}")
        return TraceScope(self, name or semconv.SPAN_ROLLOUT, rollout_id or "", attempt_id or "", store)

    def get_last_trace(self) -> list[Span]:
        """Returns the spans of the caller's current trace, else of its last one."""
        trace = _last_trace.get()
        return [] if trace is None else trace.spans

    def create_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> Span:
        """Records a span without duration, now or at ``timestamp``."""
        return self.start_span(name, attributes, timestamp).end(status, timestamp)

    @contextlib.contextmanager
    def operation_context(self, name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[OpenSpan]:
        """Records the block as one span, with its exception if it raises."""
        with running(self.start_span(name, attributes)) as span:
            yield span

    def root_context(self, trace: Trace, name: str) -> contextlib.AbstractContextManager[OpenSpan]:
        """Opens the root span of a trace; a subclass can prepare for the trace here."""
        return running(self.start_span(name, is_root=True))

    def get_handler(self, name: str) -> Any:
        """Makes a framework's callback handler for the active trace: a component of the kind ``handler``.

        Raises:
            PluginError: this tracer takes no handlers, or no plugin offers this one.
        """
        raise PluginError(f"{type(self).__name__} takes no handlers of frameworks; use the tracer 'otel'")

    def get_langchain_handler(self) -> Any:
        """Returns a LangChain callback handler for the active trace; raises as ``get_handler``."""
        return self.get_handler("langchain")

    @abstractmethod
    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        *,
        is_root: bool = False,
    ) -> OpenSpan:
        """Starts a span under the caller's active span, or (``is_root``) as the root of a new trace.

        It must be passed to ``Trace.start`` of the active trace, unless it is the root, and its ``end`` must pass it to
        ``Trace.add`` of the same trace. A second ``end`` changes nothing.
        """

    @property
    def _writers(self) -> dict[int | str, SpanWriter | None]:
        writers: dict[int | str, SpanWriter | None] = self.__dict__.setdefault("_writers_by_worker", {})
        return writers

    def _writer(self, store: LightningStore | None, stack: contextlib.ExitStack) -> SpanWriter | None:
        if store is None:
            return next((writer for writer in reversed(self._writers.values()) if writer is not None), None)
        writer = SpanWriter.shared(store)
        stack.callback(writer.release)
        return writer


class TraceScope:
    """The block in which a trace is open, for ``with`` or ``async with``; made by ``Tracer.trace_context``."""

    def __init__(
        self, tracer: Tracer, name: str, rollout_id: str, attempt_id: str, store: LightningStore | None
    ) -> None:
        self._tracer = tracer
        self._root_name = name
        self._ids = rollout_id, attempt_id
        self._store = store

    def __enter__(self) -> Trace:
        return self._open(is_async=False)

    def __exit__(self, *error: Any) -> bool | None:
        with self._stack:
            try:
                return self._root.__exit__(*error)
            finally:
                if self._trace.store is None:
                    self._trace.close()
                else:
                    deliver = self._trace.deliver(self._tracer.delivery_timeout_s)
                    waiting = threading.Thread(target=asyncio.run, args=(deliver,), daemon=True)
                    waiting.start()  # this thread may run an event loop
                    waiting.join()

    async def __aenter__(self) -> Trace:
        return self._open(is_async=True)

    async def __aexit__(self, *error: Any) -> bool | None:
        with self._stack:
            try:
                return self._root.__exit__(*error)
            finally:
                await self._trace.deliver(self._tracer.delivery_timeout_s)

    def _open(self, *, is_async: bool) -> Trace:
        with contextlib.ExitStack() as stack:
            writer = self._tracer._writer(self._store, stack) if self._ids[0] else None
            if writer is not None and is_async:
                writer.bind_loop()
            elif writer is not None and not writer.store.capabilities["thread_safe"]:
                raise ConfigError(f"{type(writer.store).__name__} belongs to an event loop: use async with")
            self._trace = Trace(*self._ids, writer)
            self._trace.tracer = self._tracer
            _last_trace.set(self._trace)
            self._root = self._run_root()
            self._root.__enter__()
            self._stack = stack.pop_all()
        return self._trace

    @contextlib.contextmanager
    def _run_root(self) -> Iterator[None]:
        with activate(self._trace), self._tracer.root_context(self._trace, self._root_name):
            try:
                yield
            finally:
                self._trace.end_started()


@contextlib.contextmanager
def running(span: OpenSpan) -> Iterator[OpenSpan]:
    """Makes a started span the active span of the block, and ends it after the block, with the exception if any."""
    try:
        with span.active():
            yield span
    except BaseException as error:
        span.record_exception(error)
        raise
    finally:
        span.end()


_SCALARS = (str, bool, int, float)


def flatten(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flat attributes: nested mappings, and lists that do not only hold scalars, get dotted names.

    None is omitted, scalars of numpy and torch become Python's, bytes become base64, and other values that are not
    JSON become their ``repr``.
    """
    return dict(_flatten("", attributes))


def to_json(value: Any) -> str:
    """Returns a value as JSON, in which bytes become base64, and other values that are not JSON their ``repr``."""
    try:
        return json.dumps(value, default=_simplify, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, or a cycle
        return json.dumps(repr(value), ensure_ascii=False)


def exception_attributes(error: BaseException) -> dict[str, str]:
    """Returns OpenTelemetry's attributes of an exception."""
    return {
        "exception.type": type(error).__qualname__,
        "exception.message": str(error),
        "exception.stacktrace": format_error(error),
    }


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _SCALARS):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, (list, tuple)):
        if all(isinstance(item, _SCALARS) for item in value):
            yield prefix, list(value)
        else:
            for i, item in enumerate(value):
                yield from _flatten(f"{prefix}.{i}", item)
    elif value is not None:
        simple = _simplify(value)
        yield from _flatten(prefix, repr(value) if type(simple) is type(value) else simple)


def _simplify(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
        return value.item()
    return repr(value)
