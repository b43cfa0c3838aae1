from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from agentlightning.adapter import TraceToMessages
from agentlightning.emitter import emit_message
from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.litagent import wrap
from agentlightning.runner import LitAgentRunner
from agentlightning.store.capabilities import StoreCapabilities
from agentlightning.store.span_writer import SpanWriter
from agentlightning.tracer import DummyTracer
from agentlightning.types import AttemptedRollout, Span
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore
from tests.waiting import LIMIT_S, until

NEVER_S = 3 * LIMIT_S
"""A delay that no test outlasts."""


class FaultyStore(InMemoryLightningStore):
    """The memory store, with scripted faults in ``add_many_spans``."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Exception] = []
        self.is_stalled = False
        self.batches: list[int] = []
        self.threads: set[str] = set()

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        self.batches.append(len(spans))
        self.threads.add(threading.current_thread().name)
        while self.is_stalled:  # noqa: ASYNC110 # called in several event loops
            await asyncio.sleep(0.01)
        if self.failures:
            raise self.failures.pop(0)
        if any("poison" in span.attributes for span in spans):
            raise ConfigError("what is sent to the store has to be JSON")
        return await super().add_many_spans(spans)


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    store = FaultyStore()
    yield store
    await store.close()


def span_of(rollout: AttemptedRollout, name: str = "step", **attributes: object) -> Span:
    return Span.from_attributes(
        attributes=attributes, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, name=name
    )


def ids_of(rollout: AttemptedRollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


async def names_in(store: FaultyStore, rollout: AttemptedRollout) -> list[str]:
    return [span.name for span in await store.query_spans(rollout.rollout_id)]


async def test_spans_reach_the_store_in_the_order_of_put(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_batch=7)
    for i in range(100):
        writer.put(span_of(rollout, str(i)))
    assert await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == [str(i) for i in range(100)]
    writer.close()


async def test_spans_that_arrive_together_share_a_write(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_delay_s=NEVER_S)
    for _ in range(300):
        writer.put(span_of(rollout))
    await writer.flush(timeout_s=LIMIT_S)
    assert len(store.batches) == 1
    writer.close()


async def test_a_flush_does_not_wait_for_more_spans_to_come(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_delay_s=NEVER_S)
    writer.put(span_of(rollout))
    assert await writer.flush(*ids_of(rollout), timeout_s=LIMIT_S)
    writer.close()


async def test_spans_are_written_in_the_writers_thread(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_delay_s=NEVER_S)
    writer.put(span_of(rollout))
    assert await writer.flush(*ids_of(rollout), timeout_s=LIMIT_S)
    assert store.threads == {"agl-spans"}
    writer.close()


async def test_an_event_loop_that_ends_during_a_flush_loses_no_span(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    store.is_stalled = True
    writer = SpanWriter(store, max_delay_s=NEVER_S)
    for i in range(3):
        writer.put(span_of(rollout, str(i)))
    flushed = await asyncio.to_thread(lambda: asyncio.run(writer.flush(timeout_s=0.05)))
    store.is_stalled = False
    writer.put(span_of(rollout, "3"))
    assert not flushed
    assert await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == ["0", "1", "2", "3"]
    writer.close()


async def test_closing_in_an_event_loop_writes_queued_spans(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    store.is_stalled = True
    writer = SpanWriter(store)
    writer.put(span_of(rollout))
    assert not await writer.flush(timeout_s=0.05)
    threading.Timer(0.1, setattr, (store, "is_stalled", False)).start()
    writer.close(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == ["step"]
    assert writer.undelivered(*ids_of(rollout)) == 0


async def test_a_span_reaches_the_store_without_a_flush(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store)
    writer.put(span_of(rollout))
    await until(lambda: names_in(store, rollout))
    writer.close()


async def test_flushing_an_attempt_does_not_wait_for_spans_of_other_attempts(store: FaultyStore) -> None:
    first, second = await store.start_rollout(0), await store.start_rollout(1)
    writer = SpanWriter(store, max_batch=1)
    writer.put(span_of(first))
    assert await writer.flush(*ids_of(first), timeout_s=LIMIT_S)
    store.is_stalled = True
    writer.put(span_of(second))
    assert await writer.flush(*ids_of(first), timeout_s=LIMIT_S)
    store.is_stalled = False
    writer.close()


async def test_putting_a_span_never_waits_for_a_stalling_store_and_no_span_is_lost(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    store.is_stalled = True
    writer = SpanWriter(store)
    for i in range(1000):  # if put waited, it would never return
        assert writer.put(span_of(rollout, str(i)))
    assert not await writer.flush(*ids_of(rollout), timeout_s=0.05)
    assert writer.undelivered(*ids_of(rollout)) == 1000
    store.is_stalled = False
    assert await writer.flush(*ids_of(rollout), timeout_s=LIMIT_S)
    assert writer.undelivered(*ids_of(rollout)) == 0
    assert len(await store.query_spans(rollout.rollout_id)) == 1000
    writer.close()


async def test_spans_beyond_max_bytes_are_dropped_and_counted_for_their_attempt(store: FaultyStore) -> None:
    big, small = await store.start_rollout(0), await store.start_rollout(1)
    store.is_stalled = True
    writer = SpanWriter(store, max_bytes=10_000)
    assert writer.put(span_of(small))
    taken = [writer.put(span_of(big, text="x" * 1000)) for _ in range(20)]
    assert taken.count(False) == writer.dropped(*ids_of(big)) > 0
    assert writer.dropped(*ids_of(small)) == 0
    store.is_stalled = False
    assert await writer.flush(timeout_s=LIMIT_S)
    assert len(await names_in(store, big)) == taken.count(True)
    assert writer.put(span_of(big, text="x" * 1000)), "there is room again"
    writer.close()


async def test_token_lists_count_towards_max_bytes(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_bytes=10_000)
    assert not writer.put(span_of(rollout, prompt_token_ids=list(range(5000))))
    assert not writer.put(span_of(rollout, nested={"a": ["y" * 20_000]}))
    writer.close()


async def test_writes_to_a_failing_store_are_retried_in_order(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    store.failures = [StoreError("busy"), ConnectionResetError("gone"), TimeoutError(), ConflictError("lost a race")]
    writer = SpanWriter(store, max_batch=4)
    for i in range(12):
        writer.put(span_of(rollout, str(i)))
    assert await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == [str(i) for i in range(12)]
    assert writer.dropped(*ids_of(rollout)) == 0
    writer.close()


async def test_spans_of_an_unknown_attempt_do_not_block_other_spans(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_delay_s=0.1)
    unknown = Span.from_attributes(attributes={}, rollout_id="ro-none", attempt_id="at-none")
    for span in (span_of(rollout, "a"), unknown, unknown, span_of(rollout, "b")):
        writer.put(span)
    assert await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == ["a", "b"]
    assert writer.dropped("ro-none", "at-none") == 2
    assert writer.dropped(*ids_of(rollout)) == 0
    writer.close()


async def test_a_span_that_the_store_refuses_does_not_block_other_spans_of_its_attempt(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_delay_s=0.1)
    for span in (span_of(rollout, "a"), span_of(rollout, "bad", poison=True), span_of(rollout, "b")):
        writer.put(span)
    assert await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == ["a", "b"]
    assert writer.dropped(*ids_of(rollout)) == 1
    writer.close()


async def test_spans_are_dropped_if_the_store_fails_for_too_long_but_the_writer_continues(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    store.failures = [StoreError("down")] * 3
    writer = SpanWriter(store, give_up_s=0.0)
    writer.put(span_of(rollout, "lost"))
    await writer.flush(timeout_s=LIMIT_S)
    assert writer.dropped(*ids_of(rollout)) == 1
    store.failures = []
    writer.put(span_of(rollout, "kept"))
    await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == ["kept"]
    writer.close()


class TroubledStore(FaultyStore):
    """Fails to write any batch that contains a span with the attribute ``broken``."""

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        if any("broken" in span.attributes for span in spans):
            self.batches.append(len(spans))
            raise StoreError("the server answered 500")
        return await super().add_many_spans(spans)


async def test_a_failing_span_does_not_delay_other_attempts_or_other_spans_of_its_attempt_for_long() -> None:
    store = TroubledStore()
    troubled, other = await store.start_rollout(0), await store.start_rollout(1)
    writer = SpanWriter(store, give_up_s=NEVER_S)
    for name in ("a", "b"):
        writer.put(span_of(troubled, name))
        writer.put(span_of(troubled, "broken", broken=True))
        writer.put(span_of(other, name))
    assert await writer.flush(*ids_of(other), timeout_s=LIMIT_S)
    assert await names_in(store, other) == ["a", "b"]

    async def others_are_there() -> bool:
        return await names_in(store, troubled) == ["a", "b"]

    await until(others_are_there)
    for i in range(20):
        writer.put(span_of(other, str(i)))
        assert await writer.flush(*ids_of(other), timeout_s=LIMIT_S)
    assert writer.queued == writer.undelivered(*ids_of(troubled)) == 2
    assert not await writer.flush(timeout_s=0.01)
    await asyncio.to_thread(writer.close, timeout_s=0.1)
    assert writer.dropped(*ids_of(troubled)) == writer.lost == 2
    await store.close()


async def test_only_the_span_that_fails_for_too_long_is_dropped() -> None:
    store = TroubledStore()
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, give_up_s=0.5)
    for name in ("a", "b", "c"):
        writer.put(span_of(rollout, name, **({"broken": True} if name == "b" else {})))
    assert await writer.flush(timeout_s=LIMIT_S)
    assert await names_in(store, rollout) == ["a", "c"]
    assert writer.dropped(*ids_of(rollout)) == 1
    assert writer.queued == 0
    writer.close()
    await store.close()


async def test_a_store_that_works_again_gets_every_span() -> None:
    store = FaultyStore()
    rollouts = [await store.start_rollout(i) for i in range(8)]
    writer = SpanWriter(store, max_batch=10)
    store.failures = [StoreError("down")] * 30
    for i in range(40):
        for rollout in rollouts:
            writer.put(span_of(rollout, str(i)))
    assert await writer.flush(timeout_s=LIMIT_S)
    for rollout in rollouts:
        assert sorted(await names_in(store, rollout), key=int) == [str(i) for i in range(40)]
    assert (writer.lost, writer.queued) == (0, 0)
    writer.close()
    await store.close()


async def test_closing_writes_queued_spans_and_drops_later_ones(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store, max_delay_s=NEVER_S)
    writer.put(span_of(rollout))
    await asyncio.to_thread(writer.close)
    assert await names_in(store, rollout) == ["step"]
    assert not writer.put(span_of(rollout))
    assert writer.dropped(*ids_of(rollout)) == 1


async def test_closing_does_not_wait_for_a_store_that_hangs(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    store.is_stalled = True
    writer = SpanWriter(store)
    writer.put(span_of(rollout))
    writer.close(timeout_s=0.1)  # otherwise this would never return
    store.is_stalled = False


async def test_many_threads_may_put_spans_concurrently(store: FaultyStore) -> None:
    rollouts = [await store.start_rollout(i) for i in range(16)]
    writer = SpanWriter(store, max_batch=50)

    def put_all(rollout: AttemptedRollout) -> None:
        for i in range(100):
            writer.put(span_of(rollout, str(i)))

    threads = [threading.Thread(target=put_all, args=(rollout,)) for rollout in rollouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert await writer.flush(timeout_s=LIMIT_S)
    for rollout in rollouts:
        assert await names_in(store, rollout) == [str(i) for i in range(100)]
    writer.close()


async def test_shared_writers_of_a_store_are_one_writer_until_the_last_release(store: FaultyStore) -> None:
    rollout = await store.start_rollout(0)
    first, second = SpanWriter.shared(store), SpanWriter.shared(store)
    assert first is second
    first.release()
    assert second.put(span_of(rollout))
    await asyncio.to_thread(second.release)
    assert not second.put(span_of(rollout))
    third = SpanWriter.shared(store)
    assert third is not first
    third.release()


async def test_flushing_all_attempts_records_their_dropped_spans_in_the_store(store: FaultyStore) -> None:
    """A gateway in another process records its own losses, because no runner has access to its writer."""
    rollout, other = await store.start_rollout(0), await store.start_rollout(1)
    writer = SpanWriter(store, max_bytes=3000)
    writer.put(Span.from_attributes(attributes={}, rollout_id="ro-none", attempt_id="at-none"))
    writer.put(span_of(other))
    assert not writer.put(span_of(rollout, text="x" * 5000))
    await store.update_attempt(*ids_of(rollout), status="succeeded")
    assert await writer.flush(*ids_of(other), timeout_s=LIMIT_S)
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.spans_dropped == 0
    assert await writer.flush(timeout_s=LIMIT_S)
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    whole = await store.get_latest_attempt(other.rollout_id)
    assert attempt is not None
    assert whole is not None
    assert (attempt.spans_dropped, attempt.status, whole.spans_dropped) == (1, "succeeded", 0)
    writer.close()


async def test_an_attempt_that_lost_spans_is_excluded_from_training_with_a_warning(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs an agent whose spans exceed the bound of 64 MB, and adapts them."""

    def agent(task: int) -> float:
        for _ in range(70):
            emit_message("x" * 2**20)
        store.is_stalled = False
        return 1.0

    runner: LitAgentRunner[int] = LitAgentRunner(DummyTracer())
    with runner.run_context(agent=wrap(agent), store=store):
        store.is_stalled = True
        lost = await runner.step(0)
        kept = await runner.step(1)  # the queue has space again
    assert lost.status == kept.status == "succeeded"
    dropped = []
    for rollout in (lost, kept):
        assert isinstance(rollout, AttemptedRollout)
        spans = list(await store.query_spans(rollout.rollout_id))
        dropped.append(rollout.attempt.spans_dropped)
        assert len(spans) + dropped[-1] == 72, "seventy messages, a reward and a root"
        adapted = TraceToMessages().adapt_attempt(rollout.attempt, spans)
        assert (adapted is None) is bool(dropped[-1])
    assert dropped[0] > 0
    assert f"attempt {lost.attempt.attempt_id} of rollout {lost.rollout_id} is left out: {dropped[0]} of" in caplog.text


class BoundStore(FaultyStore):
    """A store that must be called in one event loop."""

    @property
    def capabilities(self) -> StoreCapabilities:
        return {**super().capabilities, "thread_safe": False}


async def test_a_store_that_is_not_thread_safe_is_called_on_its_own_loop() -> None:
    store = BoundStore()
    rollout = await store.start_rollout(0)
    writer = SpanWriter(store)
    writer.bind_loop()
    writer.put(span_of(rollout))
    assert await writer.flush(timeout_s=LIMIT_S)
    assert store.threads == {threading.current_thread().name}
    writer.close(timeout_s=NEVER_S)
    await store.close()
