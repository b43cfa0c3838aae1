"""Conformance tests for tracers.

Use them like this::

    class TestMyTracer(TracerConformance):
        @pytest.fixture
        def tracer(self):
            return MyTracer()
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import pickle
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from agentlightning import semconv
from agentlightning.emitter import emit_message, emit_reward, operation
from agentlightning.errors import StoreError
from agentlightning.records import AttemptedRollout, Span, TraceStatus
from agentlightning.reward import find_final_reward
from agentlightning.run.thread import run_in_thread
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning.testing import promised
from agentlightning.tracer.tracer import Tracer, get_active_tracer

__all__ = ["TracerConformance"]


@contextlib.asynccontextmanager
async def working(tracer: Tracer, store: LightningStore) -> AsyncIterator[None]:
    """Sets a tracer up as a runner does."""
    tracer.init()
    tracer.init_worker("worker", store)
    try:
        yield
    finally:
        await asyncio.to_thread(tracer.teardown_worker, "worker")
        tracer.teardown()


@contextlib.asynccontextmanager
async def memory_store(
    *, stall: Callable[[], Awaitable[object]] | None = None, is_failing: bool = False
) -> AsyncIterator[LightningStore]:
    """Opens an empty store; optionally its first write of spans waits for ``stall``, or all of them fail."""
    store = create_store("memory://")
    add_many_spans = store.add_many_spans
    stalls = [stall] if stall else []

    async def add_slowly(spans: Sequence[Span]) -> Sequence[Span]:
        if stalls:
            await stalls.pop()()
        if is_failing:
            raise StoreError("the store is down")
        return await add_many_spans(spans)

    if stall or is_failing:
        setattr(store, "add_many_spans", add_slowly)  # noqa: B010 # a method of an instance, which types forbid
    try:
        yield store
    finally:
        await store.close()


def ids_of(rollout: AttemptedRollout) -> dict[str, Any]:
    """Returns the ids as arguments of ``trace_context``."""
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


async def stored(store: LightningStore, rollout: AttemptedRollout) -> list[Span]:
    """Returns the spans of an attempt in the order of their arrival."""
    return list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))


async def by_name(store: LightningStore, rollout: AttemptedRollout) -> dict[str, Span]:
    """Returns the spans of an attempt by name."""
    return {span.name: span for span in await stored(store, rollout)}


@pytest.mark.asyncio
class TracerConformance:
    """Tests that every tracer must pass.

    Subclass it and define one fixture, ``tracer``: a new tracer, before ``init``. Tests are asynchronous and need
    ``pytest-asyncio``, in either of its modes.
    """

    async def test_spans_form_one_tree_under_the_root(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context("agent", **ids_of(rollout)):
                with tracer.operation_context("outer", {"depth": 1}) as outer:
                    outer.set_attributes({"more": "said later"})
                    with tracer.operation_context("inner"):
                        tracer.create_span("leaf")
                tracer.create_span("second leaf")
            spans = await by_name(store, rollout)
        assert set(spans) == {"leaf", "inner", "outer", "second leaf", "agent"}, f"every span is stored once: {spans}"
        assert len({span.trace_id for span in spans.values()}) == 1, "all spans of a trace have its trace_id"
        names = {span.span_id: name for name, span in spans.items()}
        parents = {name: names.get(span.parent_id or "") for name, span in spans.items()}
        assert parents == {
            "leaf": "inner",
            "inner": "outer",
            "outer": "agent",
            "second leaf": "agent",
            "agent": None,
        }, f"operation_context and create_span make a child of the open span, below the root: {parents}"
        assert spans["outer"].attributes == {"depth": 1, "more": "said later"}, "set_attributes adds to a span"

    async def test_ids_are_hex_digits_of_opentelemetrys_lengths(self, tracer: Tracer) -> None:
        async with tracer.trace_context() as trace:
            tracer.create_span("one")
        assert len({span.span_id for span in trace.spans}) == 2, "each span has its own span_id"
        for span in trace.spans:
            assert re.fullmatch("[0-9a-f]{32}", span.trace_id), f"a trace_id has 32 hex digits: {span.trace_id}"
            assert re.fullmatch("[0-9a-f]{16}", span.span_id), f"a span_id has 16 hex digits: {span.span_id}"

    async def test_each_attempt_has_its_own_trace(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            traces = set()
            for number in range(2):
                rollout = await store.start_rollout(number)
                async with tracer.trace_context(**ids_of(rollout)):
                    pass
                traces |= {span.trace_id for span in await stored(store, rollout)}
        assert len(traces) == 2, "trace_context begins a new trace for each attempt"

    async def test_an_error_of_an_agent_is_recorded_on_its_spans_and_raised(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)

            async def act() -> None:
                async with tracer.trace_context(**ids_of(rollout)):
                    with tracer.operation_context("tool"):
                        raise ZeroDivisionError("division by zero")

            with pytest.raises(ZeroDivisionError):
                await act()
            spans = await stored(store, rollout)
        assert len(spans) == 2, f"spans of an agent that failed are stored, too: {spans}"
        for span in spans:
            status, types = span.status, [event.attributes.get("exception.type") for event in span.events]
            assert (status.status_code, status.description) == ("ERROR", "ZeroDivisionError: division by zero"), (
                f"a span that an error ends has the status ERROR with type and message: {status}"
            )
            assert types == ["ZeroDivisionError"], (
                f"a span that an error ends has one event with exception.type: {types}"
            )

    async def test_a_span_has_the_given_time_and_status(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)):
                span = tracer.create_span("past", timestamp=1_700_000_000.5, status=TraceStatus(status_code="OK"))
            kept = (await by_name(store, rollout))["past"]
        times = (kept.start_time, kept.end_time, span.start_time)
        assert set(times) == {1_700_000_000.5}, f"create_span starts and ends at its timestamp: {times}"
        assert kept.status.status_code == span.status.status_code == "OK", f"create_span takes a status: {kept.status}"
        assert kept.span_id == span.span_id, "create_span returns the span that is stored"
        assert kept.rollout_id == span.rollout_id == rollout.rollout_id, "a span has the ids of its attempt"

    async def test_a_span_lasts_from_its_start_to_its_end(self, tracer: Tracer) -> None:
        async with tracer.trace_context() as trace:
            began = time.time()
            with tracer.operation_context("work"):
                await asyncio.sleep(0.02)
            ended = time.time()
        span = trace.spans[0]
        assert span.start_time is not None
        assert span.end_time is not None
        assert began - 0.01 <= span.start_time <= span.end_time - 0.015, "operation_context lasts as long as its block"
        assert span.end_time <= ended + 0.01, "operation_context ends with its block"

    async def test_emitters_record_to_the_active_trace(self, tracer: Tracer) -> None:
        async with tracer.trace_context() as trace:
            emit_message("hello")
            with operation(name="search") as search:
                search.set_output("found")
            emit_reward({"right": 1.0, "short": 0.5}, primary_key="right")
        message, search_span, reward, root = trace.spans
        assert message.attributes.get(semconv.MESSAGE_BODY) == "hello", f"emit_message records to the trace: {message}"
        assert search_span.attributes.get(semconv.OPERATION_NAME) == "search", f"so does operation: {search_span}"
        assert find_final_reward([reward]) == 1.0, f"so does emit_reward: {reward}"
        parents = {span.parent_id for span in (message, search_span, reward)}
        assert parents == {root.span_id}, "spans of emitters are children of the trace's root"

    async def test_the_active_tracer_is_set_only_inside_a_trace(self, tracer: Tracer) -> None:
        assert get_active_tracer() is None, "no tracer is active before trace_context"
        async with tracer.trace_context():
            assert get_active_tracer() is tracer, "trace_context makes its tracer the active one"
            there = await run_in_thread(get_active_tracer, name="agent")
            assert there is tracer, "a thread that the agent starts has the same active tracer"
        assert get_active_tracer() is None, "no tracer is active after trace_context"

    @pytest.mark.parametrize("kind", ["tasks", "threads", "both"])
    async def test_64_rollouts_traced_at_once_never_mix(self, tracer: Tracer, kind: str) -> None:
        async def act(number: int) -> None:
            for step in range(5):
                emit_message(f"{number}.{step}")
                await asyncio.sleep(0.001)
            emit_reward(float(number))

        def act_in_thread(number: int) -> None:
            for step in range(5):
                emit_message(f"{number}.{step}")
                time.sleep(0.001)
            emit_reward(float(number))

        async def run(number: int, rollout: AttemptedRollout) -> list[Span]:
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                if kind == "tasks" or (kind == "both" and number % 2):
                    await act(number)
                else:
                    await run_in_thread(lambda: act_in_thread(number), name=f"agent {number}")
            return trace.spans

        async with memory_store() as store, working(tracer, store):
            rollouts = [await store.start_rollout(number) for number in range(64)]
            traces = await asyncio.gather(*(run(number, rollout) for number, rollout in enumerate(rollouts)))
            for number, rollout in enumerate(rollouts):
                spans = await stored(store, rollout)
                said = [span.attributes[semconv.MESSAGE_BODY] for span in spans if span.name == semconv.SPAN_MESSAGE]
                expected = [f"{number}.{step}" for step in range(5)]
                assert said == expected, (
                    f"a span belongs to the attempt in whose context it began: {said}, not {expected}"
                )
                assert find_final_reward(spans) == number, "an attempt has its own reward"
                assert len({span.trace_id for span in spans}) == 1, "an attempt has one trace"
                stored_ids, ids = ([span.span_id for span in each] for each in (spans, traces[number]))
                assert stored_ids == ids, "trace.spans are the stored spans of the attempt, in their order"
            count = (await store.statistics())["spans"]
            assert count == 64 * 7, f"every span is stored once: {count} of {64 * 7}"

    async def test_every_span_is_stored_when_the_trace_context_ends(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                for number in range(50):
                    tracer.create_span(f"step {number}", {"i": number})
            spans = await stored(store, rollout)
        names = [span.name for span in spans]
        expected = [*(f"step {number}" for number in range(50)), semconv.SPAN_ROLLOUT]
        assert names == expected, f"when trace_context ends, all spans are stored, in order, the root last: {names}"
        assert [span.sequence_id for span in spans] == list(range(1, 52)), "spans of an attempt are numbered from 1"
        assert [span.span_id for span in trace.spans] == [span.span_id for span in spans], "trace.spans has all spans"
        assert trace.dropped == 0, f"trace.dropped counts lost spans, and none was: {trace.dropped}"

    async def test_an_open_span_is_ended_with_its_attempt_and_a_late_span_is_stored_with_it(
        self, tracer: Tracer
    ) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                context, unfinished = contextvars.copy_context(), tracer.start_span("open")
            unfinished.end()
            context.run(tracer.create_span, "late")
            writer = SpanWriter.shared(store)
            assert await writer.flush(timeout_s=60), "a late span goes to the store's span writer"
            writer.release()
            spans = await stored(store, rollout)
        marks = {
            span.name: [mark for mark in (semconv.UNFINISHED, semconv.LATE) if mark in span.attributes]
            for span in spans
        }
        assert marks == {"open": [semconv.UNFINISHED], semconv.SPAN_ROLLOUT: [], "late": [semconv.LATE]}, (
            f"the tracer marks spans that the attempt's end has ended, and later ones: {marks}"
        )
        assert len(spans) == 3, "a span is stored once, although its owner ends it after the attempt"
        inside = [span.name for span in trace.spans]
        assert inside == ["open", semconv.SPAN_ROLLOUT], f"trace.spans has no late spans: {inside}"
        assert trace.dropped == 0, "open and late spans are not lost"

    async def test_a_stalling_store_neither_slows_an_agent_nor_loses_any_of_its_1000_spans(
        self, tracer: Tracer
    ) -> None:
        recorded, unchanged = -1, 0

        async def stall() -> None:
            """Stalls until the agent has recorded all spans, or none since the last 100 looks: it waits for us."""
            nonlocal unchanged
            seen = -1
            while recorded < 1000 and unchanged < 100:
                unchanged = unchanged + 1 if seen == recorded else 0
                seen = recorded
                await asyncio.sleep(0.01)

        async with memory_store(stall=stall) as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                for recorded in range(1000):
                    tracer.create_span("step", {"i": recorded, "text": "x" * 200})
                recorded = 1000
            assert unchanged < 100, "the agent waited for the store"
            count = (await store.statistics())["spans"]
            assert (trace.dropped, count) == (0, 1001), (
                f"spans wait for a slow store: {trace.dropped} lost, {count} stored"
            )

    async def test_it_works_again_after_it_was_torn_down(self, tracer: Tracer) -> None:
        for _ in range(2):
            async with memory_store() as store, working(tracer, store):
                rollout = await store.start_rollout(0)
                async with tracer.trace_context(**ids_of(rollout)):
                    tracer.create_span("step")
                names = set(await by_name(store, rollout))
                assert names == {"step", semconv.SPAN_ROLLOUT}, (
                    f"after teardown, init makes a tracer usable again: {names}"
                )

    async def test_it_can_be_pickled_before_it_is_used(self, tracer: Tracer) -> None:
        with promised("a tracer can be pickled before init: runner processes get a copy"):
            there = pickle.loads(pickle.dumps(tracer))  # noqa: S301 # our own bytes
        async with there.trace_context() as trace:
            there.create_span("step")
        assert [span.name for span in trace.spans] == ["step", semconv.SPAN_ROLLOUT], "the copy records as the original"
