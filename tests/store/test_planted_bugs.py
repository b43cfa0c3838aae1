"""The conformance kit can fail: stores with a planted bug, each caught by the test that is named beside it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import pytest

from agentlightning import lifecycle
from agentlightning.event import Event
from agentlightning.store.backend import Claim, Guard, Listener, Page, Put, Query, Row, Write
from agentlightning.store.engine import BackendStore
from agentlightning.testing.store import StoreConformance, step
from agentlightning.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Record,
    Rollout,
    Span,
)
from agentlightning_plugins.memory_store import InMemoryLightningStore, MemoryBackend

R = TypeVar("R", bound=Record)


class SlowBackend(MemoryBackend):
    """No bug: gives way to others before and after every step, as a backend with a disk or a network does."""

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        await asyncio.sleep(0)
        done = await super().commit(writes, guards, events)
        await asyncio.sleep(0)
        return done

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        await asyncio.sleep(0)
        claimed = await super().claim(run_id, limit, decide)
        for _ in range(4):
            await asyncio.sleep(0)
        return claimed

    async def select(self, query: Query[R]) -> Page[R]:
        await asyncio.sleep(0)
        page = await super().select(query)
        await asyncio.sleep(0)
        return page

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        await asyncio.sleep(0)
        stored = await super().append_spans(spans, now)
        await asyncio.sleep(0)
        return stored


class TestSlowBackend(StoreConformance):
    """The engine stands on any backend: the races that memory never shows are won here."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[BackendStore]:
        store = BackendStore(SlowBackend())
        yield store
        await store.close()


class HandsOutTwice(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        page = await self.select(Query(Rollout))
        waiting = [row for row in page.rows if row.record.status == "queuing" and row.record.run_id == run_id][:limit]
        if not waiting:
            return []
        await asyncio.sleep(0)  # the read and the write are two steps
        writes, events = decide([(row, 0) for row in waiting])
        await self.commit(writes, (), events)
        return [row.record for row in waiting]


class LosesOrder(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        for queue in self._queues.values():
            queue.move_to_end(next(reversed(queue)), last=False)
        return await super().claim(run_id, limit, decide)


class SharesTheQueue(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        return await super().claim(next(iter(self._queues), run_id), limit, decide)


class NeverTells(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        return lambda: None


class StoresTwice(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        for span in spans:
            self._spans.positions.pop((span.rollout_id, span.attempt_id, span.span_id), None)
        return await super().append_spans(spans, now)


class IgnoresGuards(SlowBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return await super().commit(writes, (), events)


class IgnoresOffset(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        page = await super().select(query)
        if query.offset and query.kind is Rollout:
            return Page(list(page.rows)[1:], page.total, page.position)
        return page


class EnqueuesOneByOne(InMemoryLightningStore):
    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        return [(await super(EnqueuesOneByOne, self).enqueue_many_rollouts([request]))[0] for request in requests]


class AliasesInputs(InMemoryLightningStore):
    async def enqueue_rollout(self, input: Any, *args: Any, **kwargs: Any) -> Rollout:
        rollout = await super().enqueue_rollout(input, *args, **kwargs)
        row = await self._rollout(rollout.rollout_id)
        await self._database.backend.commit([Put(row.record.model_copy(update={"input": input}))])
        return rollout


class TakesNoneForUnset(InMemoryLightningStore):
    async def update_rollout(self, rollout_id: str, **changes: Any) -> Rollout:  # type: ignore[override] # shorter
        given = {name: UNSET if value is None else value for name, value in changes.items()}
        return await super().update_rollout(rollout_id, **given)


class TouchesEndedRollouts(InMemoryLightningStore):
    async def update_attempt(self, rollout_id: str, attempt_id: str, *args: Any, **kwargs: Any) -> Attempt:
        attempt = await super().update_attempt(rollout_id, attempt_id, *args, **kwargs)
        if attempt.late_status is not None:
            row = await self._rollout(rollout_id)
            await self._database.backend.commit([Put(row.record.model_copy(update={"status": attempt.late_status}))])
        return attempt


class MixesAttempts(InMemoryLightningStore):
    async def query_spans(
        self, rollout_id: str | None, attempt_id: str | Literal["latest"] | None = None, **options: Any
    ) -> PaginatedResult[Span]:
        return await super().query_spans(rollout_id, None, **options)


class LosesCancelledClaims(BackendStore):
    def __init__(self) -> None:
        super().__init__(SlowBackend())

    async def _claim(self, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        return await self._claim_now(limit, worker_id)


class LosesWakeUps(InMemoryLightningStore):
    """Wakes one claimer for a whole batch, and none for the rest of it."""

    def __init__(self) -> None:
        super().__init__()
        publish = self._database.waiters.publish
        self._database.stop_watching()
        self._database.backend.watch(lambda events: publish(events[:1]))


class ReturnsEarly(InMemoryLightningStore):
    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        for rollout_id in rollout_ids:
            if ended := await super().wait_for_rollouts([rollout_id], 0):
                return ended
        return await super().wait_for_rollouts(rollout_ids, timeout)


class CopiesNoAttempt(InMemoryLightningStore):
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        row: Row[Rollout] | None = await self._row(Rollout, rollout_id)
        return None if row is None else row.record


class SortsUpwardsOnly(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        return await super().select(replace(query, descending=False) if query.limit != 1 else query)


class PublishesToEverybody(InMemoryLightningStore):
    def with_run(self, run_id: str) -> PublishesToEverybody:
        return self


def forgets_deadlines() -> BackendStore:
    return BackendStore(MemoryBackend(), watchdog_interval_s=None)


PLANTED: list[tuple[Callable[[], BackendStore], str]] = [
    (lambda: BackendStore(HandsOutTwice()), "test_a_claimed_rollout_is_never_handed_out_twice"),
    (lambda: BackendStore(LosesOrder()), "test_rollouts_are_claimed_in_the_order_they_were_enqueued"),
    (lambda: BackendStore(SharesTheQueue()), "test_every_run_has_a_queue_of_its_own"),
    (lambda: BackendStore(NeverTells()), "test_a_waiting_claim_gets_the_rollout_that_comes"),
    (lambda: BackendStore(NeverTells()), "test_waiting_returns_when_the_last_rollout_ends"),
    (lambda: BackendStore(NeverTells()), "test_another_thread_can_wait_too"),
    (lambda: BackendStore(StoresTwice()), "test_a_span_that_is_stored_is_not_stored_again"),
    (lambda: BackendStore(IgnoresGuards()), "test_versions_published_at_once_are_all_kept"),
    (lambda: BackendStore(IgnoresOffset()), "test_pages_cover_everything_once"),
    (EnqueuesOneByOne, "test_enqueueing_many_is_all_or_none"),
    (AliasesInputs, "test_changing_what_was_given_changes_nothing_stored"),
    (TakesNoneForUnset, "test_unset_and_none_differ"),
    (TouchesEndedRollouts, "test_a_late_result_is_kept_on_the_attempt_only"),
    (MixesAttempts, "test_spans_of_attempts_are_told_apart"),
    (LosesCancelledClaims, "test_a_cancelled_claim_loses_no_rollout"),
    (LosesWakeUps, "test_every_waiting_claim_gets_one_of_many_rollouts"),
    (ReturnsEarly, "test_waiting_returns_when_the_last_rollout_ends"),
    (CopiesNoAttempt, "test_rollouts_come_with_their_latest_attempt"),
    (lambda: BackendStore(SortsUpwardsOnly()), "test_attempts_are_sorted_and_paged"),
    (PublishesToEverybody, "test_a_subscriber_sees_the_life_of_a_rollout_in_order"),
    (forgets_deadlines, "test_an_attempt_past_its_timeout_ends_by_itself"),
]


@pytest.mark.parametrize(("make_store", "named_test"), PLANTED, ids=[test for _, test in PLANTED])
async def test_a_planted_bug_fails_the_test_named_for_it(
    make_store: Callable[[], BackendStore], named_test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PATIENCE_S", 1.0)
    store = make_store()
    try:
        with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
            await getattr(StoreConformance(), named_test)(store)
    finally:
        await store.close()


async def test_a_lifecycle_that_allows_anything_fails_the_test_named_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = frozenset(lifecycle.ROLLOUT_TRANSITIONS)
    anything: Mapping[str, frozenset[str]] = dict.fromkeys(everything, everything)
    monkeypatch.setattr(lifecycle, "ROLLOUT_TRANSITIONS", anything)
    store = InMemoryLightningStore()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await StoreConformance().test_a_succeeded_rollout_is_final(store)
    await store.close()


def test_the_kit_keeps_its_tests() -> None:
    tests = [name for name, _ in inspect.getmembers(StoreConformance, inspect.iscoroutinefunction)]
    assert all(name.startswith("test_") for name in tests)
    assert len(tests) >= 75
