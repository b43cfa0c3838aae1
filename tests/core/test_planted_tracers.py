"""Tracers with a planted bug, each of which fails the conformance test that is named next to it.

``test_tracer.py`` shows that correct tracers pass the same tests.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from agentlightning.testing.tracer import TracerConformance
from agentlightning.tracer import DummyTracer, OpenSpan, Trace, Tracer
from agentlightning.tracer import tracer as tracer_module
from agentlightning.types import Span, TraceStatus
from tests.core.tracer_semantics import TracerSemantics
from tests.planted import assert_each_test_finds_one, assert_found


class Semantics(TracerSemantics, TracerConformance):
    """All tests of a tracer."""


class Planted(DummyTracer):
    """A dummy tracer whose spans are spoiled by a subclass."""

    def start_span(
        self,
        name: str,
        attributes: Mapping[str, Any] | None = None,
        start_time: float | None = None,
        *,
        is_root: bool = False,
    ) -> OpenSpan:
        span: Any = super().start_span(name, attributes, start_time, is_root=is_root)
        self.spoil(span, is_root)
        return span

    def spoil(self, span: Any, is_root: bool) -> None: ...


class EverySpanIsARoot(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        span._parent_id = None


class ShortIds(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        span.span_id = span.span_id[:8]


class OneTraceForAll(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        span.trace_id = "0" * 32


class SwallowsErrors(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        span.record_exception = lambda error: None


class LivesInTheNow(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        span._start_time = time.time()


class NoTimeAtAll(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        end = span.end
        span.end = lambda status=None, end_time=None: end(status, span._start_time)


class LosesLateSpans(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        end, trace = span.end, span._trace

        def end_in_time(status: TraceStatus | None = None, end_time: float | None = None) -> Span:
            span._trace = trace if trace is not None and trace._is_open else None
            return end(status, end_time)

        span.end = end_in_time


class MixesAttempts(Planted):
    newest: Trace | None = None

    def spoil(self, span: Any, is_root: bool) -> None:
        if is_root:
            type(self).newest = span._trace
        elif self.newest is not None:
            span._trace = self.newest


class WritesAtOnce(Planted):
    """A tracer whose first span waits for the store."""

    has_waited = False

    def spoil(self, span: Any, is_root: bool) -> None:
        end = span.end

        def end_and_wait(status: TraceStatus | None = None, end_time: float | None = None) -> Span:
            ended: Span = end(status, end_time)
            writer = None if span._trace is None or self.has_waited else span._trace._writer
            self.has_waited = True
            while writer is not None and writer.queued:
                time.sleep(0.001)
            return ended

        span.end = end_and_wait


class DropsQuietly(Planted):
    def spoil(self, span: Any, is_root: bool) -> None:
        if span._trace is not None and not is_root:
            span._trace = None


class CannotTravel(Planted):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class WorksOnce(Planted):
    is_over = False

    def teardown(self) -> None:
        self.is_over = True

    def spoil(self, span: Any, is_root: bool) -> None:
        if self.is_over:
            span._trace = None


class ForgetsToDeliver(Planted):
    @contextlib.asynccontextmanager
    async def trace_context(self, name: str | None = None, **ids: Any) -> AsyncIterator[Trace]:
        async def deliver(timeout_s: float) -> None: ...

        async with super().trace_context(name, **ids) as trace:
            trace.deliver = deliver  # the bug
            yield trace


class CountsNothing(Planted):
    @contextlib.asynccontextmanager
    async def trace_context(self, name: str | None = None, **ids: Any) -> AsyncIterator[Trace]:
        async with super().trace_context(name, **ids) as trace:
            yield trace
        trace._undelivered = 0


class StaysActive(Planted):
    @contextlib.asynccontextmanager
    async def trace_context(self, name: str | None = None, **ids: Any) -> AsyncIterator[Trace]:
        async with super().trace_context(name, **ids) as trace:
            active = tracer_module.get_active_trace()
            yield trace
        tracer_module._active.set(active)


PLANTED: list[tuple[type[Tracer], str, str]] = [
    (EverySpanIsARoot, "test_spans_form_one_tree_under_the_root", "make a child of the open span"),
    (EverySpanIsARoot, "test_emitters_record_to_the_active_trace", "children of the trace's root"),
    (ShortIds, "test_ids_are_hex_digits_of_opentelemetrys_lengths", "a span_id has 16 hex digits"),
    (OneTraceForAll, "test_each_attempt_has_its_own_trace", "begins a new trace"),
    (SwallowsErrors, "test_an_error_of_an_agent_is_recorded_on_its_spans_and_raised", "that an error ends has"),
    (LivesInTheNow, "test_a_span_has_the_given_time_and_status", "starts and ends at its timestamp"),
    (NoTimeAtAll, "test_a_span_lasts_from_its_start_to_its_end", "lasts as long as its block"),
    (LosesLateSpans, "test_an_open_span_is_ended_with_its_attempt_and_a_late_span_is_stored_with_it", "and later ones"),
    (MixesAttempts, "test_64_rollouts_traced_at_once_never_mix[tasks]", "a span belongs to the attempt"),
    (MixesAttempts, "test_64_rollouts_traced_at_once_never_mix[threads]", "a span belongs to the attempt"),
    (WritesAtOnce, "test_a_stalling_store_neither_slows_an_agent_nor_loses_any_of_its_1000_spans", "the agent waited"),
    (DropsQuietly, "test_every_span_is_stored_when_the_trace_context_ends", "all spans are stored, in order"),
    (DropsQuietly, "test_spans_past_the_bound_are_dropped_and_counted", ""),
    (CannotTravel, "test_it_can_be_pickled_before_it_is_used", "a tracer can be pickled"),
    (WorksOnce, "test_it_works_again_after_it_was_torn_down", "init makes a tracer usable again"),
    (ForgetsToDeliver, "test_every_span_is_stored_when_the_trace_context_ends", "all spans are stored, in order"),
    (CountsNothing, "test_spans_that_could_not_be_delivered_are_counted_on_the_trace", ""),
    (StaysActive, "test_the_active_tracer_is_set_only_inside_a_trace", "no tracer is active after"),
]


@pytest.mark.parametrize(
    ("make_tracer", "name", "message"), PLANTED, ids=[f"{make.__name__}-{name}" for make, name, _ in PLANTED]
)
def test_a_tracer_with_a_planted_bug_fails_the_test_of_the_broken_behaviour(
    make_tracer: type[Tracer], name: str, message: str, request: pytest.FixtureRequest
) -> None:
    test, _, kind = name.partition("[")
    given = {"kind": kind.rstrip("]")} if kind else {}
    assert_found(Semantics, test, request, message, tracer=make_tracer(), **given)
    tracer_module._active.set(None)


def test_every_test_of_the_kit_finds_a_mistake() -> None:
    assert_each_test_finds_one(TracerConformance, [name.partition("[")[0] for _, name, message in PLANTED if message])
