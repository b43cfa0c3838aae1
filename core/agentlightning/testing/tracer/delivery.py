"""Tests of the delivery of spans: complete, in order, and without delaying the agent."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.store.span_writer import MAX_BYTES, SpanWriter
from agentlightning.testing.tracer.fixtures import by_name, ids_of, memory_store, stored, working
from agentlightning.tracer.tracer import Tracer


class DeliveryTests:
    """Tests of the delivery to the store."""

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

    async def test_without_ids_spans_stay_in_the_trace(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            async with tracer.trace_context() as trace:
                tracer.create_span("here")
            assert (await store.statistics())["spans"] == 0
        assert trace.spans[0].name == "here"

    async def test_a_trace_can_use_another_store(self, tracer: Tracer) -> None:
        async with memory_store() as store, memory_store() as other, working(tracer, store):
            rollout = await other.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout), store=other):
                tracer.create_span("there")
            assert set(await by_name(other, rollout)) == {"there", semconv.SPAN_ROLLOUT}
            assert (await store.statistics())["spans"] == 0

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

    async def test_spans_past_the_bound_are_dropped_and_counted(self, tracer: Tracer) -> None:
        megabyte = "x" * 2**20
        async with memory_store(stall=lambda: asyncio.sleep(0.5)) as store, working(tracer, store):
            rollout = await store.start_rollout(0)
            async with tracer.trace_context(**ids_of(rollout)) as trace:
                for _ in range(MAX_BYTES // 2**20 + 10):
                    tracer.create_span("big", {"text": megabyte})
            kept = await stored(store, rollout)
        assert trace.dropped >= 10
        assert len(kept) + trace.dropped == MAX_BYTES // 2**20 + 11

    async def test_spans_that_could_not_be_delivered_are_counted_on_the_trace(self, tracer: Tracer) -> None:
        async with memory_store(is_failing=True) as store:
            rollout = await store.start_rollout(0)
            tracer.delivery_timeout_s = 0.1
            async with tracer.trace_context(**ids_of(rollout), store=store) as trace:
                tracer.create_span("lost")
        assert trace.dropped == 2, "the span and the root"

    async def test_a_worker_id_can_be_used_again_after_teardown_but_not_twice(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            with pytest.raises(ConfigError, match="teardown_worker"):
                tracer.init_worker("worker", store)
            tracer.teardown_worker("worker")
            tracer.teardown_worker("worker")
            tracer.init_worker("worker", store)

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
