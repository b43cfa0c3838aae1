"""The semantics of tracers that the base class ``Tracer`` decides, for all tracers."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.store.span_writer import MAX_BYTES
from agentlightning.testing.tracer import by_name, ids_of, memory_store, stored, working
from agentlightning.tracer import Tracer, get_active_tracer


@pytest.mark.asyncio
class TracerSemantics:
    """Tests of traces and their delivery, with one fixture: ``tracer``."""

    async def test_each_caller_has_its_own_last_trace(self, tracer: Tracer) -> None:
        async def trace_something() -> None:
            async with tracer.trace_context("other"):
                pass

        assert tracer.get_last_trace() == []
        async with tracer.trace_context("mine"):
            tracer.create_span("inside")
            assert [span.name for span in tracer.get_last_trace()] == ["inside"]
        await asyncio.create_task(trace_something())
        assert [span.name for span in tracer.get_last_trace()] == ["inside", "mine"]

    async def test_a_rollout_id_without_an_attempt_id_is_rejected(self, tracer: Tracer) -> None:
        with pytest.raises(ConfigError, match="together"):
            async with tracer.trace_context(rollout_id="ro-1"):
                pass

    async def test_with_records_as_async_with_does(self, tracer: Tracer) -> None:
        async with memory_store() as store, working(tracer, store):
            rollout = await store.start_rollout(0)

            def fail() -> None:
                with tracer.trace_context("plain", **ids_of(rollout)):
                    tracer.create_span("inside")
                    assert get_active_tracer() is tracer
                    raise KeyError("no such key")

            with pytest.raises(KeyError, match="no such key"):
                fail()
            assert get_active_tracer() is None
            spans = await by_name(store, rollout)
            assert set(spans) == {"inside", "plain"}
            assert spans["inside"].parent_id == spans["plain"].span_id
            assert spans["plain"].status.status_code == "ERROR"

            def record() -> list[str]:  # no event loop runs in this thread
                with tracer.trace_context(**ids_of(rollout)), tracer.operation_context("in a thread"):
                    pass
                with tracer.trace_context() as unstored:
                    pass
                return [span.name for span in unstored.spans]

            assert await asyncio.to_thread(record) == [semconv.SPAN_ROLLOUT]
            assert "in a thread" in await by_name(store, rollout)

    async def test_a_store_of_one_event_loop_needs_async_with(
        self, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with memory_store() as store:
            rollout = await store.start_rollout(0)
            monkeypatch.setattr(type(store), "capabilities", {"thread_safe": False})
            with pytest.raises(ConfigError, match="async with"), tracer.trace_context(**ids_of(rollout), store=store):
                pass
            async with tracer.trace_context(**ids_of(rollout), store=store):
                pass
            assert set(await by_name(store, rollout)) == {semconv.SPAN_ROLLOUT}

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
