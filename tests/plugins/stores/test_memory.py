"""The memory store: conformance, flat costs and the delivery of events."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

from agentlightning.errors import NotFoundError
from agentlightning.event import Event, RolloutEnqueued
from agentlightning.store import Retention
from agentlightning.store.backend import Condition, Guard, Operator, Page, Put, Query, Write
from agentlightning.store.engine import BackendStore
from agentlightning.testing.store import StoreConformance
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Record, Rollout
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore, MemoryBackend
from tests.plugins.stores.actions import make_span, number_deleted
from tests.plugins.stores.semantics import EngineSemantics
from tests.waiting import until

R = TypeVar("R", bound=Record)


class TestInMemoryLightningStore(EngineSemantics, StoreConformance):
    @pytest.fixture
    async def store(self) -> AsyncIterator[InMemoryLightningStore]:
        store = InMemoryLightningStore(watchdog_interval_s=0.05)
        yield store
        await store.close()


async def filled(rollouts: int) -> InMemoryLightningStore:
    """Returns a store with this many finished rollouts in one run, with one attempt each."""
    store = InMemoryLightningStore()
    for first in range(0, rollouts, 1000):  # a single batch of a million would outlast the leases
        numbers = range(first, min(first + 1000, rollouts))
        requests = [EnqueueRolloutRequest(input=n, metadata={"group": n // 4, "step": n // 64}) for n in numbers]
        await store.enqueue_many_rollouts(requests)
        for claimed in await store.dequeue_many_rollouts(limit=1000, worker_id="worker-1"):
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    return store


Operation = Callable[[InMemoryLightningStore, AttemptedRollout], Awaitable[object]]

KEEP_ALL = Retention(max_age_s=9.0, max_rollouts=10**6)
OPERATIONS: dict[str, Operation] = {
    "enqueue and claim": lambda store, _: enqueue_and_claim(store),
    "append": lambda store, claimed: store.add_many_spans([make_span(claimed) for _ in range(3)]),
    "wait": lambda store, claimed: store.wait_for_rollouts([claimed.rollout_id], timeout=0),
    "get": lambda store, claimed: store.get_rollout_by_id(claimed.rollout_id),
    "attempts": lambda store, claimed: store.query_attempts(claimed.rollout_id),
    "live": lambda store, _: store.query_rollouts(status_in=["preparing", "running"], limit=5),
    "finished": lambda store, _: store.query_rollouts(status_in=["succeeded"], limit=5),
    "first page": lambda store, _: store.query_rollouts(limit=5),
    "group": lambda store, _: store.query_rollouts(metadata={"group": 3}),
    "heartbeat": lambda store, _: store.update_worker("worker-1"),
    "statistics": lambda store, _: store.statistics(),
    "nothing to delete": lambda store, _: number_deleted(KEEP_ALL, store, 1.0),
}


async def enqueue_and_claim(store: InMemoryLightningStore) -> None:
    queued = await store.enqueue_rollout("a")
    claimed = await store.dequeue_rollout("worker-1")
    assert claimed is not None
    assert claimed.rollout_id == queued.rollout_id
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")


@pytest.mark.parametrize(("few", "many"), [(100, 5_000), pytest.param(1_000, 1_000_000, marks=pytest.mark.soak)])
async def test_operations_cost_the_same_with_few_and_many_stored_rollouts(few: int, many: int) -> None:
    """Counts the instructions of Python that are executed, which do not depend on the load of the machine."""
    costs = []
    for stored in (few, many):
        store = await filled(stored)
        claimed = await store.start_rollout("a")
        costs.append({name: await count_instructions(run(store, claimed)) for name, run in OPERATIONS.items()})
        await store.close()
    for name, before in costs[0].items():
        assert before > 50
        assert costs[1][name] < 1.5 * before, f"{name}: {before} with {few} rollouts, {costs[1][name]} with {many}"


async def count_instructions(operation: Awaitable[object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await operation
    finally:
        sys.settrace(before)
    return count


@pytest.mark.soak
async def test_a_million_spans_pass_through_a_store_with_retention_in_bounded_memory() -> None:
    """Stores ten thousand rollouts with a hundred spans each, of which retention keeps five hundred rollouts."""
    store = InMemoryLightningStore()
    watchdog = store._watchdog
    store.retain(Retention(max_rollouts=500))
    sizes: list[int] = []
    for number in range(10_000):
        claimed = await store.start_rollout(number, worker_id="worker-1")
        await store.add_many_spans([make_span(claimed, text="x" * 200) for _ in range(100)])
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        if number % 500 == 499:
            watchdog._retained_at = 0.0
            await watchdog.retain(time.time())
            sizes.append(resident_bytes())
    statistics = await store.statistics()
    assert (statistics["rollouts"], statistics["spans"]) == (500, 50_000)
    assert max(sizes) < sizes[1] + 64 * 2**20, sizes
    read = 0
    cursor: str | None = None
    while True:  # the stored spans can be read page by page
        page = await store.query_spans(None, limit=1000, cursor=cursor)
        read, cursor = read + len(page), page.cursor
        if cursor is None:
            break
    assert read == 50_000
    await store.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_two_stores_over_one_database_never_act_on_stale_records() -> None:
    backend = MemoryBackend()
    ours, theirs = BackendStore(backend), BackendStore(backend)
    await ours.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    cancelled, begun, touched = await ours.dequeue_many_rollouts(limit=3, worker_id="worker-1")
    await theirs.cancel_rollout(cancelled.rollout_id)
    late = await ours.update_attempt(cancelled.rollout_id, cancelled.attempt.attempt_id, status="succeeded")
    assert (late.status, late.late_status) == ("failed", "succeeded")
    await theirs.add_span(make_span(begun))
    await ours.add_span(make_span(begun))
    await theirs.update_rollout(touched.rollout_id, metadata={"note": 1})
    await ours.update_attempt(touched.rollout_id, touched.attempt.attempt_id, status="succeeded")
    states = [(rollout.status, rollout.metadata) for rollout in await theirs.query_rollouts()]
    assert states == [("cancelled", None), ("running", None), ("succeeded", {"note": 1})]
    await ours.delete_rollouts([touched.rollout_id])
    with pytest.raises(NotFoundError):
        await theirs.update_attempt(touched.rollout_id, touched.attempt.attempt_id, status="failed")
    for store in (ours, theirs):
        await store.close()


async def test_one_rollout_takes_no_more_than_four_reads_and_three_commits() -> None:
    """Each read or commit is a round trip to a networked database. ``wait_for_rollouts`` reads twice."""
    calls: Counter[str] = Counter()

    class CountingBackend(MemoryBackend):
        async def select(self, query: Query[R]) -> Page[R]:
            calls["reads"] += 1
            return await super().select(query)

        async def commit(
            self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()
        ) -> bool:
            calls["commits"] += 1
            return await super().commit(writes, guards, events)

    store = BackendStore(CountingBackend(), watchdog_interval_s=None)
    queued = await store.enqueue_rollout("a")
    claimed = await store.dequeue_rollout("worker-1")
    assert claimed is not None
    for _ in range(3):
        await store.add_many_spans([make_span(claimed)])
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    await store.wait_for_rollouts([queued.rollout_id])
    assert calls == {"reads": 4, "commits": 3}
    await store.close()


async def test_events_of_several_threads_are_delivered_in_commit_order() -> None:
    backend = MemoryBackend()
    seen: list[Event] = []
    inside = threading.Semaphore()

    def listen(events: Sequence[Event]) -> None:
        assert inside.acquire(blocking=False), "two threads delivered events at the same time"
        seen.extend(events)
        inside.release()

    backend.watch(listen)

    async def count_up() -> None:
        for _ in range(300):
            while True:  # the revision of one record gives the order of the commits
                page = await backend.select(Query(Rollout))
                revision = page.rows[0].revision if page.rows else 0
                put = Put(Rollout(rollout_id="ro-1", input=revision, start_time=0.0))
                guard = Guard(Rollout, ("ro-1",), revision)
                if await backend.commit([put], [guard], [RolloutEnqueued(rollout_id=str(revision))]):
                    break

    await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(count_up())) for _ in range(4)))
    await until(lambda: len(seen) >= 1200)
    assert [getattr(event, "rollout_id", "") for event in seen] == [str(revision) for revision in range(1200)]


async def test_a_failing_watcher_does_not_affect_the_writer_or_other_watchers(caplog: pytest.LogCaptureFixture) -> None:
    backend = MemoryBackend()
    seen: list[Event] = []

    def fail(events: Sequence[Event]) -> None:
        raise RuntimeError("a bug of a watcher")

    backend.watch(fail)
    stop = backend.watch(lambda events: seen.extend(events))
    assert await backend.commit([], (), [RolloutEnqueued(rollout_id="ro-1")])
    assert len(seen) == 1
    assert "a bug of a watcher" in caplog.text
    stop()
    assert await backend.commit([], (), [RolloutEnqueued(rollout_id="ro-2")])
    assert len(seen) == 1


@pytest.mark.parametrize("order", [None, "start_time"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "where",
    [
        (),
        (("run_id", "eq", "a"),),
        (("run_id", "eq", "a"), ("status", "in", ("queuing", "failed"))),
        (("run_id", "in", ("a", "b", "a")), ("status", "eq", "failed")),
        (("rollout_id", "in", ("ro-3", "ro-1", "ro-99", "ro-3")),),
        (("metadata.group", "eq", 1), ("start_time", "ge", 5.0)),
        (("metadata.group", "eq", None),),
        (("metadata.group", "in", (1, [2])),),
        (("rollout_id", "contains", "1"), ("start_time", "le", 12.0)),
        (("status", "in", ()),),
        (("mode", "ge", "a"),),
    ],
)
async def test_a_query_gives_the_same_result_with_and_without_an_index(
    where: Sequence[tuple[str, Operator, object]], descending: bool, order: str | None
) -> None:
    backend = MemoryBackend()
    rollouts = [
        Rollout(
            rollout_id=f"ro-{number}",
            input=number,
            start_time=float(number * 7 % 20),
            run_id="ab"[number % 2],
            status="failed" if number % 3 else "queuing",
            metadata={"group": number % 4} if number % 5 else None,
        )
        for number in range(20)
    ]
    await backend.commit([Put(rollout) for rollout in rollouts])
    moved = rollouts[4].model_copy(update={"status": "queuing"})  # replaced: keeps its place in the order
    await backend.commit([Put(moved)])
    rollouts[4] = moved
    conditions = tuple(Condition(*test) for test in where)

    expected = [rollout for rollout in rollouts if all(holds(rollout, condition) for condition in conditions)]
    if order is not None:
        expected.sort(key=lambda rollout: rollout.start_time, reverse=descending)
    elif descending:
        expected.reverse()
    for limit, offset in ((-1, 0), (3, 0), (3, 2), (0, 0), (100, 1)):
        query = Query(Rollout, conditions, (), order, descending, limit, offset, count=True)
        page: Page[Rollout] = await backend.select(query)
        stop = None if limit < 0 else offset + limit
        assert [row.record.input for row in page.rows] == [rollout.input for rollout in expected[offset:stop]]
        assert page.total == len(expected)


def holds(rollout: Rollout, condition: Condition) -> bool:
    """Returns whether the rollout meets the condition, without any index."""
    value: object = getattr(rollout, condition.field.split(".")[0])
    if "." in condition.field:
        value = (rollout.metadata or {}).get(condition.field.split(".")[1])
    match condition.op:
        case "eq":
            return bool(value == condition.value)
        case "in":
            return value in condition.value
        case "contains":
            return isinstance(value, str) and condition.value in value
        case "ge":
            return value is not None and value >= condition.value
        case "le":
            return value is not None and value <= condition.value


async def test_deleting_most_of_the_records_keeps_the_order_of_the_rest() -> None:
    store = await filled(3000)
    ids = [rollout.rollout_id for rollout in await store.query_rollouts()]
    kept = ids[::50]
    assert await store.delete_rollouts(sorted(set(ids) - set(kept))) == len(ids) - len(kept)
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == kept
    page = await store.query_rollouts(limit=10, offset=10)
    assert [rollout.rollout_id for rollout in await store.query_rollouts(limit=10, cursor=page.cursor)] == kept[20:30]
    await store.enqueue_rollout("new")
    assert [rollout.input for rollout in await store.query_rollouts(status_in=["queuing"])] == ["new"]
    await store.close()


def test_pickling_a_memory_store_explains_why_it_fails() -> None:
    with pytest.raises(TypeError, match="LightningStoreServer"):
        pickle.dumps(InMemoryLightningStore())
