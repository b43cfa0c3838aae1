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
import pickle
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
        assert len({span.trace_id for span in spans.values()}) == 1
        assert {name: span.parent_id for name, span in spans.items()} == {
            "leaf": spans["inner"].span_id,
            "inner": spans["outer"].span_id,
            "outer": spans["agent"].span_id,
            "second leaf": spans["agent"].span_id,
            "agent": None,
        }
        assert spans["outer"].attributes == {"depth": 1, "more": "said later"}

    async def test_ids_are_hex_digits_of_opentelemetrys_lengths(self, tracer: Tracer) -> None:
        async with tracer.trace_context() as trace:
            tracer.create_span("one")
        assert len({span.span_id for span in trace.spans}) == 2
        for span in trace.spans:
            assert len(bytes.fromhex(span.trace_id)) == 16
            assert len(bytes.fromhex(span.span_id)) == 8

    async def test_each_attempt_has_its_own_trace(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            traces = set()
            for number in range(2):
                rollout = await store.start_rollout(number)
                async with tracer.trace_context(**ids_of(rollout)):
                    pass
                traces |= {span.trace_id for span in await stored(store, rollout)}
        assert len(traces) == 2

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
        assert len(spans) == 2
        for span in spans:
            assert span.status.status_code == "ERROR"
            assert span.status.description == "ZeroDivisionError: division by zero"
            (event,) = span.events
            assert event.attributes["exception.type"] == "ZeroDivisionError"

    async def test_a_span_has_the_given_time_and_status(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)):
                span = tracer.create_span("past", timestamp=1_700_000_000.5, status=TraceStatus(status_code="OK"))
            kept = (await by_name(store, rollout))["past"]
        assert kept.start_time == kept.end_time == span.start_time == 1_700_000_000.5
        assert kept.status.status_code == span.status.status_code == "OK"
        assert kept.span_id == span.span_id
        assert kept.rollout_id == span.rollout_id == rollout.rollout_id

    async def test_a_span_lasts_from_its_start_to_its_end(self, tracer: Tracer) -> None:
        async with tracer.trace_context() as trace:
            began = time.time()
            with tracer.operation_context("work"):
                await asyncio.sleep(0.02)
            ended = time.time()
        span = trace.spans[0]
        assert span.start_time is not None
        assert span.end_time is not None
        assert began - 0.01 <= span.start_time <= span.end_time - 0.015
        assert span.end_time <= ended + 0.01

    async def test_emitters_record_to_the_active_trace(self, tracer: Tracer) -> None:
        async with tracer.trace_context() as trace:
            emit_message("hello")
            with operation(name="search") as search:
                search.set_output("found")
            emit_reward({"right": 1.0, "short": 0.5}, primary_key="right")
        message, search_span, reward, root = trace.spans
        assert message.attributes[semconv.MESSAGE_BODY] == "hello"
        assert search_span.attributes[semconv.OPERATION_NAME] == "search"
        assert find_final_reward([reward]) == 1.0
        assert {span.parent_id for span in (message, search_span, reward)} == {root.span_id}

    async def test_the_active_tracer_is_set_only_inside_a_trace(self, tracer: Tracer) -> None:
        assert get_active_tracer() is None
        async with tracer.trace_context():
            assert get_active_tracer() is tracer
            assert await run_in_thread(get_active_tracer, name="agent") is tracer
        assert get_active_tracer() is None

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
                assert said == [f"{number}.{step}" for step in range(5)]
                assert find_final_reward(spans) == number
                assert len({span.trace_id for span in spans}) == 1
                assert [span.span_id for span in spans] == [span.span_id for span in traces[number]]
            assert (await store.statistics())["spans"] == 64 * 7

    async def test_every_span_is_stored_when_the_trace_context_ends(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                for number in range(50):
                    tracer.create_span(f"step {number}", {"i": number})
            spans = await stored(store, rollout)
        assert [span.name for span in spans] == [f"step {number}" for number in range(50)] + [semconv.SPAN_ROLLOUT]
        assert [span.sequence_id for span in spans] == list(range(1, 52))
        assert [span.span_id for span in trace.spans] == [span.span_id for span in spans]
        assert trace.dropped == 0

    async def test_a_span_that_ends_after_its_attempt_is_stored_with_it(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                late = tracer.start_span("late")
            late.end()
            writer = SpanWriter.shared(store)
            assert await writer.flush(timeout_s=60)
            writer.release()
            assert set(await by_name(store, rollout)) == {"late", semconv.SPAN_ROLLOUT}
        assert [span.name for span in trace.spans] == [semconv.SPAN_ROLLOUT]

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
            assert trace.dropped == 0
            assert (await store.statistics())["spans"] == 1001

    async def test_it_works_again_after_it_was_torn_down(self, tracer: Tracer) -> None:
        for _ in range(2):
            async with memory_store() as store, working(tracer, store):
                rollout = await store.start_rollout(0)
                async with tracer.trace_context(**ids_of(rollout)):
                    tracer.create_span("step")
                assert set(await by_name(store, rollout)) == {"step", semconv.SPAN_ROLLOUT}

    async def test_it_can_be_pickled_before_it_is_used(self, tracer: Tracer) -> None:
        there = pickle.loads(pickle.dumps(tracer))  # noqa: S301 # our own bytes
        async with there.trace_context() as trace:
            there.create_span("step")
        assert [span.name for span in trace.spans] == ["step", semconv.SPAN_ROLLOUT]
