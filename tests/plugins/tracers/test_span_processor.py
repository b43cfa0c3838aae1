"""``LightningSpanProcessor``: spans of the program's own OpenTelemetry provider."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Status, StatusCode

import agentlightning as agl


@pytest.fixture
async def store() -> AsyncIterator[agl.LightningStore]:
    store = agl.InMemoryLightningStore()
    yield store
    await store.close()


async def test_each_trace_becomes_a_rollout_without_a_runner(store: agl.LightningStore) -> None:
    provider = TracerProvider()
    provider.add_span_processor(agl.LightningSpanProcessor(store))
    tracer = provider.get_tracer("any")
    for question in ("one", "two"):
        with tracer.start_as_current_span(question) as root:
            with tracer.start_as_current_span("inside"):
                pass
            late = tracer.start_span("late")
            if question == "two":
                root.set_status(Status(StatusCode.ERROR, "no answer"))
        assert provider.force_flush()
        late.end()
    provider.shutdown()
    rollouts = await store.query_rollouts()
    assert [(rollout.input, rollout.status) for rollout in rollouts] == [("one", "succeeded"), ("two", "failed")]
    for rollout in rollouts:
        spans = await store.query_spans(rollout.rollout_id)
        assert sorted(span.name for span in spans) == sorted(["inside", rollout.input, "late"])
        assert rollout.metadata is not None
        assert {span.trace_id for span in spans} == {rollout.metadata["trace_id"]}
    failed = rollouts[1]
    assert isinstance(failed, agl.AttemptedRollout)
    assert failed.attempt.error is not None
    assert failed.attempt.error.message == "no answer"


async def test_spans_go_to_the_attempt_that_is_given_or_active(store: agl.LightningStore) -> None:
    given, active = await store.start_rollout("given"), await store.start_rollout("active")
    ids = {"rollout_id": given.rollout_id, "attempt_id": given.attempt.attempt_id}
    with pytest.raises(agl.ConfigError, match="together"):
        agl.LightningSpanProcessor(store, given.rollout_id)
    mine, others = TracerProvider(), TracerProvider()
    mine.add_span_processor(agl.LightningSpanProcessor(store, **ids))
    others.add_span_processor(agl.LightningSpanProcessor(store))
    async with agl.DummyTracer().trace_context(
        rollout_id=active.rollout_id, attempt_id=active.attempt.attempt_id, store=store
    ):
        for provider in (mine, others):
            with provider.get_tracer("any").start_as_current_span("step"):
                pass
    for provider in (mine, others):
        provider.shutdown()
        provider.shutdown()
    assert [span.name for span in await store.query_spans(given.rollout_id)] == ["step"]
    assert "step" in {span.name for span in await store.query_spans(active.rollout_id)}
    assert len(await store.query_rollouts()) == 2
