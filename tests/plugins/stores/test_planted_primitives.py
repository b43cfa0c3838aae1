"""Backends with one planted mistake each, which ``BackendConformance`` must find and name."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import pytest

from agentlightning.errors import NotFoundError
from agentlightning.event import Event
from agentlightning.store.backend import Claim, Delete, Guard, Listener, Page, Put, Query, Write
from agentlightning.testing.store import BackendConformance, primitives
from agentlightning.testing.store import backend as kit
from agentlightning.testing.store.primitives import Listener as KitListener
from agentlightning.types import Attempt, Record, Rollout, Span
from agentlightning_plugins.stores.memory.store import MemoryBackend

pytestmark = pytest.mark.environment("main")  # a test of the conformance tests

R = TypeVar("R", bound=Record)
Events = Sequence[Event]
DURABLE = "test_a_durable_backend_keeps_what_it_acknowledged"


# --- commit ---


class WritesOneByOne(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        for number, write in enumerate(writes):
            if not await super().commit([write], guards if number == 0 else ()):
                return False
        return await super().commit([], () if writes else guards, events)


class WritesInSeveralSteps(WritesOneByOne):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        done = await super().commit(writes[:1], guards, events)
        await asyncio.sleep(0)
        return done and await super().commit(writes[1:])


class ComparesGuardsBeforeItLocks(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        holds = await super().commit([], guards)
        await asyncio.sleep(0)
        return holds and await super().commit(writes, (), events)


class IgnoresRevisionZero(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        return await super().commit(writes, [guard for guard in guards if guard.revision], events)


class ChecksTheFirstGuard(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        return await super().commit(writes, guards[:1], events)


class PublishesRefusedCommits(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        done = await super().commit(writes, guards, events)
        if not done:
            self._watchers.publish(events)
        return done


class PublishesBeforeItWrites(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        self._watchers.publish(events)
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().commit(writes, guards)


class KeepsSpansOfDeletedRollouts(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        lost = [span for span in self._spans.records.values() if Delete(Rollout, (span.rollout_id,)) in writes]
        done = await super().commit(writes, guards, events)
        for span in lost:
            self._spans.insert((span.rollout_id, span.attempt_id, span.span_id), span, self._spans.places(span))
        return done


class Blocks(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        time.sleep(0.05)  # noqa: ASYNC251 # the mistake
        return await super().commit(writes, guards, events)


class BlocksInATask(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored = asyncio.ensure_future(super().append_spans(spans, now))
        asyncio.get_running_loop().call_soon(time.sleep, 0.05)
        return await stored


# --- now, close, durable, event loops ---


class UsesAMonotonicClock(MemoryBackend):
    def now(self) -> float:
        return time.monotonic()


class ClosesOnce(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self._open = ["a connection"]

    async def close(self) -> None:
        self._open.pop()


class HasALockOfOneLoop(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self._async_lock = asyncio.Lock()

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        async with self._async_lock:
            await asyncio.sleep(0)
            return await super().commit(writes, guards, events)


class ReadsUnderALockOfOneLoop(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self._reading = asyncio.Semaphore(2)

    async def select(self, query: Query[R]) -> Page[R]:
        async with self._reading:
            await asyncio.sleep(0)
            return await super().select(query)


class KeepsItsLockWhenCancelled(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self._counting = asyncio.Lock()

    async def count(self) -> dict[str, int]:
        await self._counting.acquire()
        await asyncio.sleep(0)
        self._counting.release()  # a call that is cancelled does not come here
        return await super().count()


class SaysThatItIsDurable(MemoryBackend):
    durable = True

    async def reopened(self) -> MemoryBackend:
        return MemoryBackend()


class ForgetsRevisions(SaysThatItIsDurable):
    async def reopened(self) -> MemoryBackend:
        self._rollouts._revisions.clear()
        return self


class ForgetsHeartbeats(SaysThatItIsDurable):
    async def reopened(self) -> MemoryBackend:
        for key, position in self._attempts.positions.items():
            attempt = self._attempts.records[position]
            self._attempts.update_in_place(key, attempt.model_copy(update={"last_heartbeat_time": attempt.start_time}))
        return self


class ForgetsNumbers(SaysThatItIsDurable):
    async def reopened(self) -> MemoryBackend:
        self._last_sequence_ids.clear()
        return self


class ForgetsTheQueue(SaysThatItIsDurable):
    async def reopened(self) -> MemoryBackend:
        for queue in self._queues.values():
            queue.by_priority[0].move_to_end(next(iter(queue)))
        return self


# --- claim ---


class ReadsAndWritesInTwoSteps(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        locked: list[Any] = []
        await super().claim(run_id, limit, lambda rows: (locked.extend(rows), ([], []))[1])
        await asyncio.sleep(0)
        if locked:
            await self.commit(*_with_events(decide(locked)))
        return [row.record for row, _ in locked]


def _with_events(decided: tuple[Sequence[Write], Events]) -> tuple[Sequence[Write], tuple[()], Events]:
    return decided[0], (), decided[1]


class ClaimsInTwoCommits(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        later: list[Write] = []

        def decide_first(locked: Any) -> tuple[Sequence[Write], Events]:
            writes, events = decide(locked)
            later[:] = [write for write in writes if isinstance(write, Put) and isinstance(write.record, Attempt)]
            return [write for write in writes if write not in later], events

        claimed = await super().claim(run_id, limit, decide_first)
        await asyncio.sleep(0)
        await self.commit(later)
        return claimed


class ClaimsTheNewest(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        for queue in self._queues.values():
            for equal in queue.by_priority.values():
                equal.move_to_end(next(reversed(equal)), last=False)
        return await super().claim(run_id, limit, decide)


class IgnoresPriorities(MemoryBackend):
    def _put(self, record: Record) -> None:
        super()._put(record.model_copy(update={"priority": 0}) if isinstance(record, Rollout) else record)


class ClaimsTheLowestPriorityFirst(MemoryBackend):
    def _put(self, record: Record) -> None:
        super()._put(
            record.model_copy(update={"priority": -record.priority}) if isinstance(record, Rollout) else record
        )


class RequeuesAtEveryPut(MemoryBackend):
    def _put(self, record: Record) -> None:
        super()._put(record)
        if isinstance(record, Rollout) and record.status in ("queuing", "requeuing"):
            self._queues[record.run_id].by_priority[record.priority].move_to_end(record.rollout_id)


class ClaimsFromAllRuns(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        return await super().claim(next(iter(self._queues), run_id), limit, decide)


class LosesRolloutsIfDecideFails(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        try:
            return await super().claim(run_id, limit, decide)
        except Exception:
            self._queues[run_id].by_priority[0].popitem(last=False)
            raise


class DropsEventsOfClaims(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        return await super().claim(run_id, limit, lambda locked: (decide(locked)[0], ()))


class ReturnsClaimedRolloutsAsTheyAreNow(MemoryBackend):
    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        claimed = await super().claim(run_id, limit, decide)
        return [self._rollouts.records[self._rollouts.positions[rollout.rollout_id,]] for rollout in claimed]


# --- select, count ---


class IgnoresAnyOf(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        return await super().select(replace(query, any_of=()))


class TakesAnEmptyInForAll(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        return await super().select(replace(query, where=tuple(c for c in query.where if c.value != ())))


class IgnoresLimits(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        return await super().select(replace(query, limit=-1))


class IgnoresCursors(MemoryBackend):
    async def select(self, query: Query[R]) -> Page[R]:
        return await super().select(replace(query, after=None))


class MovesReplacedRecordsToTheEnd(MemoryBackend):
    def _put(self, record: Record) -> None:
        if isinstance(record, Rollout) and (record.rollout_id,) in self._rollouts.positions:
            self._rollouts.remove((record.rollout_id,))
        super()._put(record)


class LosesTheTypesOfNumbers(MemoryBackend):
    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        rounded = [
            Put(type(write.record).model_validate_json(write.record.model_dump_json().replace("1.0]", "1]")))
            if isinstance(write, Put)
            else write
            for write in writes
        ]
        return await super().commit(rounded, guards, events)


class CountsDeletedRollouts(MemoryBackend):
    async def count(self) -> dict[str, int]:
        return {**await super().count(), "rollouts": self._rollouts._last_position}


# --- spans and numbers ---


class RaisesRevisionsWithHeartbeats(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored = await super().append_spans(spans, now)
        for key in {(span.rollout_id, span.attempt_id) for span in spans}:
            self._attempts.replace(key, self._attempts.get(key))
        return stored


class RevivesEndedAttempts(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        stored = await super().append_spans(spans, now)
        for key in {(span.rollout_id, span.attempt_id) for span in spans}:
            attempt = self._attempts.get(key)
            assert isinstance(attempt, Attempt)
            self._attempts.update_in_place(key, attempt.model_copy(update={"last_heartbeat_time": now}))
        return stored


class ComparesOnlySpanIds(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        seen = {span.span_id for span in self._spans.records.values()}
        result: list[Span | None] = []
        for span in spans:
            result += [None] if span.span_id in seen else await super().append_spans([span], now)
            seen.add(span.span_id)
        return result


class StoresSpansAgain(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        for span in spans:
            self._spans.positions.pop((span.rollout_id, span.attempt_id, span.span_id), None)
        return await super().append_spans(spans, now)


class AppendsOneByOne(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        return [(await super(AppendsOneByOne, self).append_spans([span], now))[0] for span in spans]


class TakesSpansOfUnknownAttempts(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        try:
            return await super().append_spans(spans, now)
        except NotFoundError:
            return []


class GivesNumbersTwice(MemoryBackend):
    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        last = dict(self._last_sequence_ids)
        await asyncio.sleep(0)
        self._last_sequence_ids.update(last)
        return await super().next_sequence_ids(attempts)


class ForgetsTheNumbersOfSpans(MemoryBackend):
    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        last = dict(self._last_sequence_ids)
        stored = await super().append_spans(spans, now)
        if any(span.sequence_id for span in spans):
            self._last_sequence_ids.update(last)
        return stored


# --- watch ---


class WakesNobody(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        return lambda: None


class WakesOnlyItsOwnLoop(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        return super().watch(lambda events: listener(events) if asyncio.get_running_loop() is loop else None)


class WakesOnlyTheLastListener(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        self._watchers.listeners = ()
        return super().watch(listener)


class MissesTheFirstCommit(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        calls = count()
        return super().watch(lambda events: listener(events) if next(calls) else None)


class DeliversOneEventOfACommit(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        return super().watch(lambda events: listener(events[:1]))


class ReversesEvents(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        return super().watch(lambda events: listener(events[::-1]))


class PublishesOutOfOrder(MemoryBackend):
    _calls = count()

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Events = ()) -> bool:
        done = await super().commit(writes, guards)
        for _ in range(next(self._calls) % 3):
            await asyncio.sleep(0)
        if done:
            self._watchers.publish(events)
        return done


class CannotStopWatching(MemoryBackend):
    def watch(self, listener: Listener) -> Callable[[], None]:
        super().watch(listener)
        return lambda: None


PLANTED: list[tuple[type[MemoryBackend], str, str]] = [
    # The mistakes that the tests of stores do not find.
    (WritesOneByOne, "test_no_reader_sees_half_of_a_commit", "commit: .* one transaction"),
    (HasALockOfOneLoop, "test_every_primitive_works_in_several_event_loops", "commit: .*threading.Lock"),
    (UsesAMonotonicClock, "test_now_is_unix_time", "now: .* Unix time in seconds"),
    (PublishesRefusedCommits, "test_a_refused_commit_has_no_events", "commit: .*whose guard fails"),
    (RaisesRevisionsWithHeartbeats, "test_spans_are_heartbeats", "append_spans: .*keeps the revision"),
    (IgnoresRevisionZero, "test_a_commit_is_refused_if_a_guard_fails", "commit: .*0 means that there is no such"),
    (ClosesOnce, "test_closing_twice_is_harmless", "close: .*twice is harmless"),
    (Blocks, "test_no_primitive_blocks_the_event_loop", "commit: .*blocked the event loop for"),
    # Others.
    (WritesInSeveralSteps, "test_no_reader_sees_half_of_a_commit", "commit: .* one transaction"),
    (ComparesGuardsBeforeItLocks, "test_one_of_several_commits_with_the_same_guard_succeeds", "commit: .*exactly one"),
    (ChecksTheFirstGuard, "test_a_commit_is_refused_if_a_guard_fails", "commit: one of two guards failed"),
    (PublishesBeforeItWrites, "test_an_event_comes_after_its_change", "commit: .*after the change is committed"),
    (
        KeepsSpansOfDeletedRollouts,
        "test_deleting_a_rollout_deletes_its_attempts_and_spans",
        "commit: .*with its attempt",
    ),
    (BlocksInATask, "test_no_primitive_blocks_the_event_loop", "append_spans: .*blocked the event loop for"),
    (ReadsUnderALockOfOneLoop, "test_every_primitive_works_in_several_event_loops", "select: .*belong to one loop"),
    (KeepsItsLockWhenCancelled, "test_a_cancelled_call_leaves_the_backend_usable", "count: .*cancelled holds no lock"),
    (SaysThatItIsDurable, DURABLE, "durable: .*after reopening"),
    (ForgetsRevisions, DURABLE, "durable: .*Rollout rows .*its revision"),
    (ForgetsHeartbeats, DURABLE, "durable: .*Attempt rows .*its heartbeat"),
    (ForgetsNumbers, DURABLE, "next_sequence_ids: .*not given out again"),
    (ForgetsTheQueue, DURABLE, "claim: .*keeps its order"),
    (ReadsAndWritesInTwoSteps, "test_no_rollout_is_claimed_twice", "claim: .*handed to two callers"),
    (ClaimsInTwoCommits, "test_no_rollout_is_claimed_twice", "claim: .*without their attempts"),
    (ClaimsTheNewest, "test_claims_are_first_in_first_out", "claim: .*the first `limit` rollouts"),
    (IgnoresPriorities, "test_claims_take_the_highest_priority_first", "claim: .*of the same priority"),
    (ClaimsTheLowestPriorityFirst, "test_claims_take_the_highest_priority_first", "claim: .*the highest priority"),
    (RequeuesAtEveryPut, "test_claims_are_first_in_first_out", "claim: .*from any other"),
    (ClaimsFromAllRuns, "test_claims_are_first_in_first_out", "claim: .*the run's queue"),
    (LosesRolloutsIfDecideFails, "test_a_claim_that_fails_takes_nothing", "claim: .*1 of 2 rollouts"),
    (DropsEventsOfClaims, "test_a_claim_writes_what_is_decided", "claim: the events of decide"),
    (ReturnsClaimedRolloutsAsTheyAreNow, "test_a_claim_writes_what_is_decided", "claim: .*as they were before"),
    (IgnoresAnyOf, "test_a_query_finds_the_records_that_satisfy_it", "select: .*any_of"),
    (TakesAnEmptyInForAll, "test_a_query_finds_the_records_that_satisfy_it", "select: .*value=\\(\\)"),
    (IgnoresLimits, "test_a_query_orders_and_limits_its_rows", "select: .*limit"),
    (IgnoresCursors, "test_a_query_orders_and_limits_its_rows", "select: .*after"),
    (MovesReplacedRecordsToTheEnd, "test_a_query_orders_and_limits_its_rows", "select: .*a replacement keeps"),
    (LosesTheTypesOfNumbers, "test_records_come_back_unchanged", "select: a Run came back as"),
    (CountsDeletedRollouts, "test_count_counts_what_is_stored", "count: .*2 rollouts"),
    (RevivesEndedAttempts, "test_spans_are_heartbeats", "append_spans: last_heartbeat_time of a failed attempt"),
    (ComparesOnlySpanIds, "test_a_stored_span_is_skipped", "append_spans: .*whose rollout, attempt and span_id"),
    (StoresSpansAgain, "test_a_stored_span_is_skipped", "append_spans: .*returned as None"),
    (AppendsOneByOne, "test_spans_are_stored_all_or_none", "append_spans: .*all spans or none"),
    (TakesSpansOfUnknownAttempts, "test_spans_are_stored_all_or_none", "append_spans: .*NotFoundError"),
    (GivesNumbersTwice, "test_concurrent_calls_share_no_number", "next_sequence_ids: .*one transaction"),
    (
        ForgetsTheNumbersOfSpans,
        "test_spans_and_reserved_numbers_share_a_counter",
        "next_sequence_ids: .*after the spans",
    ),
    (WakesNobody, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: it calls each listener"),
    (WakesOnlyItsOwnLoop, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: .*other threads"),
    (WakesOnlyTheLastListener, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: .*each listener"),
    (MissesTheFirstCommit, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: .*each commit"),
    (DeliversOneEventOfACommit, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: .*all events"),
    (ReversesEvents, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: .*in order"),
    (PublishesOutOfOrder, "test_events_come_in_the_order_of_concurrent_commits", "watch: events come in the order"),
    (CannotStopWatching, "test_every_listener_gets_the_events_of_each_commit_in_order", "watch: .*stops the calls"),
]


async def run_named(backend: MemoryBackend, name: str, **fixtures: Any) -> None:
    """Runs a test of the kit as pytest does."""
    test = getattr(BackendConformance(), name)
    takes = inspect.signature(test).parameters
    await test(backend, **{name: value for name, value in fixtures.items() if name in takes})


@pytest.mark.parametrize(("planted", "named_test", "message"), PLANTED)
async def test_the_kit_finds_and_names_a_planted_mistake(
    planted: type[MemoryBackend], named_test: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KitListener, "patience_s", 0.3)  # for events that never come
    monkeypatch.setattr(kit, "SEARCH_S", 300.0)  # searches until it finds half of a commit
    if planted is KeepsItsLockWhenCancelled:
        monkeypatch.setattr(primitives, "PATIENCE_S", 0.3)
    with pytest.raises(AssertionError, match=message):  # noqa: PT012 # several tries
        for _ in range(20):  # a race may not occur at once
            backend = planted()
            await run_named(backend, named_test, reopen=getattr(backend, "reopened", None))


async def test_a_durable_backend_needs_a_fixture_that_opens_it_again() -> None:
    reopen = inspect.unwrap(BackendConformance.reopen)
    with pytest.raises(AssertionError, match="durable: it is True.*fixture `reopen`"):
        await run_named(SaysThatItIsDurable(), DURABLE, reopen=reopen(BackendConformance()))


def test_every_test_of_primitives_finds_a_planted_mistake() -> None:
    tests = {name for name, _ in inspect.getmembers(BackendConformance, inspect.iscoroutinefunction)}
    assert tests == {name for _, name, _ in PLANTED}
