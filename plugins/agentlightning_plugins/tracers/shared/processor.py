"""``LightningSpanProcessor``: spans of any OpenTelemetry provider into a store."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, wait
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace import Span as SdkSpan

from agentlightning.errors import ConfigError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning.tracer.tracer import get_active_trace
from agentlightning.types import AttemptFailure, Span
from agentlightning_plugins.shared.loop_thread import LoopThread

logger = logging.getLogger("agentlightning")

_MAX_TRACES: Final = 4096
"""Number of traces whose root span has not ended, or whose late spans are still expected."""
_FLUSH_S: Final = 30.0


class LightningSpanProcessor(SpanProcessor):
    """Sends the spans of the provider it is added to, with or without a runner.

    A span belongs to the given attempt, else to the attempt in which it was started. Otherwise each trace becomes a
    rollout of its own when its root span ends: with the name of the root span as the task, and failed if the root has
    the status ERROR. The store must be thread-safe.
    """

    def __init__(self, store: LightningStore, rollout_id: str | None = None, attempt_id: str | None = None) -> None:
        """Starts a thread, which ``shutdown`` ends; a single id raises ConfigError."""
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError(f"give rollout_id and attempt_id together, got {rollout_id!r} and {attempt_id!r}")
        if not store.capabilities["thread_safe"]:
            raise ConfigError(f"{type(store).__name__} belongs to an event loop; give a store that is thread-safe")
        self._store = store
        self._given = None if rollout_id is None or attempt_id is None else (rollout_id, attempt_id)
        self._writer = SpanWriter.shared(store)
        self._thread = LoopThread("agl-span-processor")
        self._lock = threading.Lock()
        self._started_in: dict[int, tuple[str, str]] = {}
        """The attempt of each open span, by span id."""
        self._ended: dict[int, list[ReadableSpan]] = {}
        """The ended spans of each trace whose root span is open, by trace id."""
        self._attempts: dict[int, tuple[str, str] | None] = {}
        """The attempts of the traces whose root span has ended; None before there is one."""
        self._storing = asyncio.Lock()
        self._pending: set[Future[None]] = set()
        self._is_open = True

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        trace = get_active_trace()
        if self._given is None and trace is not None and trace.rollout_id:
            self._started_in[span.context.span_id] = trace.rollout_id, trace.attempt_id

    def on_end(self, span: ReadableSpan) -> None:
        if not self._is_open:
            return
        attempt = self._given or self._started_in.pop(span.context.span_id, None)
        if attempt is not None:
            self._writer.put(Span.from_opentelemetry(span, *attempt))
            return
        trace_id = span.context.trace_id
        with self._lock:
            self._ended.setdefault(trace_id, []).append(span)
            is_root = span.parent is None or span.parent.is_remote
            if is_root:
                self._attempts.setdefault(trace_id, None)
            elif trace_id not in self._attempts:
                while len(self._ended) > _MAX_TRACES:
                    self._ended.pop(next(iter(self._ended)))
                return
            while len(self._attempts) > _MAX_TRACES:
                self._attempts.pop(next(iter(self._attempts)))
            spans = self._ended.pop(trace_id)
        work = self._thread.submit(self._store_trace(trace_id, spans))
        self._pending.add(work)
        work.add_done_callback(self._finish)

    async def _store_trace(self, trace_id: int, spans: list[ReadableSpan]) -> None:
        async with self._storing:  # late spans wait for the attempt of their trace
            attempt, root = self._attempts.get(trace_id), spans[-1]
            is_new = attempt is None
            if attempt is None:
                metadata = {"trace_id": f"{trace_id:032x}"}
                rollout = await self._store.start_rollout(root.name, metadata=metadata)
                attempt = self._attempts[trace_id] = rollout.rollout_id, rollout.attempt.attempt_id
        records = [Span.from_opentelemetry(span, *attempt) for span in spans]
        await self._store.add_many_spans(records)
        if is_new:
            failed = records[-1].status.status_code == "ERROR"
            error = AttemptFailure(type="SpanError", message=records[-1].status.description or "") if failed else None
            await self._store.update_attempt(*attempt, status="failed" if failed else "succeeded", error=error)

    def _finish(self, work: Future[None]) -> None:
        self._pending.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.warning("the spans of a trace are lost: %s", error)

    def force_flush(self, timeout_millis: int = int(_FLUSH_S * 1000)) -> bool:
        """Waits until all spans of ended traces are stored or lost; returns False if the time is up before."""
        timeout_s = timeout_millis / 1000
        flushing = self._thread.submit(self._writer.flush(timeout_s=timeout_s))
        _, late = wait([*self._pending], timeout_s)
        return not late and flushing.result()

    def shutdown(self) -> None:
        """Stores the spans of ended traces, and ends the thread; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self.force_flush()
            self._thread.close()
            self._writer.release()
