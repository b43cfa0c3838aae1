"""Stores with a planted bug, each of which must fail the conformance test named with it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis.errors import Flaky

from agentlightning.errors import NotFoundError
from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.store import lifecycle
from agentlightning.store.backend import KEYS, Backend, Claim, Delete, Guard, Listener, Page, Put, Query, Row, Write
from agentlightning.store.engine import BackendStore
from agentlightning.testing.store import DurableStoreConformance, StoreConformance, model, primitives
from agentlightning.types import UNSET, Attempt, EnqueueRolloutRequest, PaginatedResult, Record, Rollout, Span
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore, MemoryBackend
from tests.plugins.stores.semantics import EngineSemantics

pytestmark = pytest.mark.environment("main")  # a test of the conformance tests

R = TypeVar("R", bound=Record)

MODEL = "test_any_sequence_of_calls_does_what_a_simple_model_does"
HASTY = settings(model.SEARCH, phases=[Phase.generate], max_examples=1000, derandomize=True)
"""Searches until it finds an example, and does not shrink it."""


class Semantics(EngineSemantics, StoreConformance):
    """All tests of a store."""


class SlowBackend(MemoryBackend):
    """A backend without a bug that yields to other tasks before and after each operation, as with I/O."""

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


class TestSlowBackend(EngineSemantics, StoreConformance):
    """Conformance of a backend that shows races which the memory backend hides."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[BackendStore]:
        store = BackendStore(SlowBackend(), watchdog_interval_s=0.05)
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
            queue.by_priority[0].move_to_end(next(reversed(queue.by_priority[0])), last=False)
        return await super().claim(run_id, limit, decide)


class SharesTheQueue(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        return await super().claim(next(iter(self._queues), run_id), limit, decide)


class NeverPublishes(MemoryBackend):
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
    async def _enqueue_alias(self, input: Any, *args: Any, **kwargs: Any) -> Rollout:
        rollout = await super().enqueue_rollout(input, *args, **kwargs)
        row = await self._database.rollout(rollout.rollout_id)
        await self._database.backend.commit([Put(row.record.model_copy(update={"input": input}))])
        return rollout


AliasesInputs.enqueue_rollout = AliasesInputs._enqueue_alias  # a method of the class would get frozen arguments


class TakesNoneForUnset(InMemoryLightningStore):
    async def update_rollout(self, rollout_id: str, **changes: Any) -> Rollout:
        given = {name: UNSET if value is None else value for name, value in changes.items()}
        return await super().update_rollout(rollout_id, **given)


class TouchesEndedRollouts(InMemoryLightningStore):
    async def update_attempt(self, rollout_id: str, attempt_id: str, *args: Any, **kwargs: Any) -> Attempt:
        attempt = await super().update_attempt(rollout_id, attempt_id, *args, **kwargs)
        if attempt.late_status is not None:
            row = await self._database.rollout(rollout_id)
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
        self._queue._claim = self._queue.claim_now  # the bug


class LosesWakeUps(InMemoryLightningStore):
    """Wakes only one waiting claim for a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        publish = self._waiters.publish
        for stop_watching in self._watches:
            stop_watching()
        self._database.backend.watch(lambda events: publish(events[:1]))


class ReturnsEarly(InMemoryLightningStore):
    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        for rollout_id in rollout_ids:
            if ended := await super().wait_for_rollouts([rollout_id], 0):
                return ended
        return await super().wait_for_rollouts(rollout_ids, timeout)


class CopiesNoAttempt(InMemoryLightningStore):
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        row: Row[Rollout] | None = await self._database.row(Rollout, rollout_id)
        return None if row is None else row.record


class SortsUpwardsOnly(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        return await super().select(replace(query, descending=False) if query.limit != 1 else query)


class IgnoresRuns(InMemoryLightningStore):
    def with_run(self, run_id: str) -> IgnoresRuns:
        return self


class KeepsAttemptsOfDeadWorkers(InMemoryLightningStore):
    async def end_worker(self, worker_id: str) -> int:
        return len(await self._database.live_attempts(worker_id))


class AssignsWorkToDeadWorkers(InMemoryLightningStore):
    async def end_worker(self, worker_id: str) -> int:
        ended = await super().end_worker(worker_id)
        worker = await self._database.worker(worker_id)
        await self._database.backend.commit([Put(worker.model_copy(update={"ended_at": None}))])
        return ended


class ReleasesWhatRuns(InMemoryLightningStore):
    async def release_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        return await self.update_rollout(rollout_id, status="requeuing")


class RevokesNothing(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        return await super().commit(writes, guards, [event for event in events if event.kind != "attempt_revoked"])


class DeletesTheNewest(InMemoryLightningStore):
    async def delete_rollouts(self, rollout_ids: Sequence[str] | None = None, **which: Any) -> int:
        if which.get("keep") is not None:
            ended = await self.query_rollouts(status_in=which.get("status_in") or ["succeeded", "failed", "cancelled"])
            return await super().delete_rollouts([rollout.rollout_id for rollout in list(ended)[which["keep"] :]])
        return await super().delete_rollouts(rollout_ids, **which)


class RunsTheNewestVersion(InMemoryLightningStore):
    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        return await super().get_resources_by_id(resources_id.partition("@")[0], version)


class RollsBackByForgetting(InMemoryLightningStore):
    async def rollback(self, resources_id: str, version: int) -> ResourcesUpdate:
        earlier = await self.get_resources_by_id(resources_id, version)
        newest = await self.get_resources_by_id(resources_id)
        if earlier is None or newest is None:
            raise NotFoundError(f"no {resources_id}")
        await self._database.backend.commit([Delete(ResourcesUpdate, (resources_id, newest.version))])
        return await self.update_resources(resources_id, earlier.resources)


class LosesSpansThatAreNotJson(InMemoryLightningStore):
    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        return await super().add_many_spans([span for span in spans if "NaN" not in str(span)])


def revokes_nothing() -> BackendStore:
    return BackendStore(RevokesNothing(), watchdog_interval_s=0.05)


def forgets_deadlines() -> BackendStore:
    return BackendStore(MemoryBackend(), watchdog_interval_s=None)


PLANTED: list[tuple[Callable[[], BackendStore], str]] = [
    (lambda: BackendStore(HandsOutTwice()), "test_a_claimed_rollout_is_never_handed_out_twice"),
    (lambda: BackendStore(LosesOrder()), "test_rollouts_are_claimed_in_the_order_they_were_enqueued"),
    (lambda: BackendStore(SharesTheQueue()), "test_every_run_has_a_queue_of_its_own"),
    (lambda: BackendStore(NeverPublishes()), "test_a_waiting_claim_gets_a_rollout_that_arrives"),
    (lambda: BackendStore(NeverPublishes()), "test_waiting_returns_when_the_last_rollout_ends"),
    (lambda: BackendStore(NeverPublishes()), "test_another_thread_can_wait_too"),
    (lambda: BackendStore(StoresTwice()), "test_a_span_that_is_stored_is_not_stored_again"),
    (lambda: BackendStore(IgnoresGuards()), "test_concurrently_published_versions_are_kept"),
    (lambda: BackendStore(IgnoresOffset()), "test_pages_cover_everything_once"),
    (EnqueuesOneByOne, "test_enqueueing_many_is_all_or_none"),
    (AliasesInputs, "test_changing_an_argument_later_changes_no_record"),
    (TakesNoneForUnset, "test_unset_and_none_differ"),
    (TouchesEndedRollouts, "test_a_late_result_is_kept_on_the_attempt_only"),
    (MixesAttempts, "test_spans_of_different_attempts_are_kept_separate"),
    (LosesCancelledClaims, "test_a_cancelled_claim_loses_no_rollout"),
    (LosesWakeUps, "test_every_waiting_claim_gets_one_of_many_rollouts"),
    (ReturnsEarly, "test_waiting_returns_when_the_last_rollout_ends"),
    (CopiesNoAttempt, "test_rollouts_come_with_their_latest_attempt"),
    (lambda: BackendStore(SortsUpwardsOnly()), "test_attempts_are_sorted_and_paged"),
    (IgnoresRuns, "test_a_subscriber_sees_the_life_of_a_rollout_in_order"),
    (forgets_deadlines, "test_an_attempt_past_its_timeout_ends_by_itself"),
    (KeepsAttemptsOfDeadWorkers, "test_the_attempts_of_a_dead_worker_end_immediately"),
    (AssignsWorkToDeadWorkers, "test_a_dead_worker_gets_no_more_work"),
    (ReleasesWhatRuns, "test_an_attempt_that_has_begun_cannot_be_released"),
    (revokes_nothing, "test_an_event_reports_that_the_store_ended_an_attempt"),
    (DeletesTheNewest, "test_rollouts_are_deleted_by_age_count_and_status"),
    (RunsTheNewestVersion, "test_a_rollout_can_be_pinned_to_one_version_of_resources"),
    (RollsBackByForgetting, "test_an_earlier_version_can_be_published_again"),
    (LosesSpansThatAreNotJson, "test_a_span_with_values_that_are_not_json_is_stored"),
    (lambda: BackendStore(HandsOutTwice()), MODEL),
    (lambda: BackendStore(LosesOrder()), MODEL),
    (lambda: BackendStore(StoresTwice()), MODEL),
    (TouchesEndedRollouts, MODEL),
    (ReleasesWhatRuns, MODEL),
    (RollsBackByForgetting, MODEL),
]


@pytest.mark.parametrize(("make_store", "named_test"), PLANTED)
async def test_a_store_with_a_planted_bug_fails_its_conformance_test(
    make_store: Callable[[], BackendStore], named_test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "PATIENCE_S", 0.5)
    monkeypatch.setattr(model, "SEARCH", HASTY)
    store = make_store()
    try:
        # Flaky: Hypothesis repeated the calls and the bug did not appear again.
        with pytest.raises((AssertionError, pytest.fail.Exception, Flaky)):
            await getattr(Semantics(), named_test)(store)
    finally:
        await store.close()


async def test_a_lifecycle_that_allows_every_transition_fails_its_conformance_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = frozenset(lifecycle.ROLLOUT_TRANSITIONS)
    anything: Mapping[str, frozenset[str]] = dict.fromkeys(everything, everything)
    monkeypatch.setattr(lifecycle, "ROLLOUT_TRANSITIONS", anything)
    store = InMemoryLightningStore()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await EngineSemantics().test_a_succeeded_rollout_is_final(store)
    monkeypatch.setattr(model, "SEARCH", HASTY)
    with pytest.raises(AssertionError, match="should have raised ConflictError"):
        await StoreConformance().test_any_sequence_of_calls_does_what_a_simple_model_does(store)
    await store.close()


class Durable(MemoryBackend):
    durable = True


async def copy_without(forgotten: type[Record], backend: Backend) -> Durable:
    """Copies a database without the records of one kind; for ``Rollout``, only without those in the queue."""
    copy = Durable()
    for kind in KEYS:
        records = [row.record for row in (await backend.select(Query(kind))).rows]
        if kind is Rollout and forgotten is Rollout:
            records = [record for record in records if getattr(record, "end_time", None) is not None]
        elif kind is forgotten:
            continue
        if kind is Span:
            await copy.append_spans([span for span in records if isinstance(span, Span)], 0.0)
        else:
            await copy.commit([Put(record) for record in records])
    return copy


@pytest.mark.parametrize("forgotten", [Span, ResourcesUpdate, Rollout])
async def test_a_store_that_loses_records_on_reopening_fails_its_conformance_tests(
    forgotten: type[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SEARCH", HASTY)
    stores = [BackendStore(Durable())]

    async def reopen() -> BackendStore:
        await stores[-1].close()
        stores.append(BackendStore(await copy_without(forgotten, stores[-1].backend)))
        return stores[-1]

    with pytest.raises(AssertionError, match="durable: it is True, but after reopening"):
        await DurableStoreConformance().test_a_durable_backend_keeps_what_it_acknowledged(stores[0].backend, reopen)
    stores.append(BackendStore(Durable()))
    with pytest.raises((AssertionError, NotFoundError)):
        await getattr(DurableStoreConformance(), MODEL)(stores[-1], reopen)
    await stores[-1].close()


def test_the_conformance_kit_and_the_semantics_have_at_least_85_tests() -> None:
    tests = [name for name, _ in inspect.getmembers(Semantics, inspect.iscoroutinefunction)]
    assert all(name.startswith("test_") for name in tests)
    assert len(tests) >= 85
