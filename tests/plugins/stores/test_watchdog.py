"""The watchdog enforces deadlines, leases and retention in the background."""

from __future__ import annotations

import asyncio
import gc
import textwrap
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from agentlightning.errors import ConfigError
from agentlightning.event import Event
from agentlightning.store import Retention
from agentlightning.store.backend import Page, Put, Query
from agentlightning.store.engine import BackendStore, watchdog
from agentlightning.store.retention import WORKER_AGE_S, delete_old_workers
from agentlightning.types import Attempt, AttemptedRollout, EnqueueRolloutRequest, Record, RolloutConfig, Span, Worker
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore, MemoryBackend
from tests.plugins.stores.actions import number_deleted
from tests.source import run_python
from tests.waiting import until

R = TypeVar("R", bound=Record)


class ClockedBackend(MemoryBackend):
    """A backend whose clock the test sets, and which yields to other tasks, as with I/O."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 1000.0
        self.looks = 0
        """How often a watchdog's thread has looked at the clock."""

    def now(self) -> float:
        self.looks += threading.current_thread().name == "agl-watchdog"
        return self.time

    async def select(self, query: Query[R]) -> Page[R]:
        page = await super().select(query)
        await asyncio.sleep(0)
        return page


@pytest.fixture
async def store() -> AsyncIterator[BackendStore]:
    """A store with a lease of 60 s, whose watchdog scans when the test passes time."""
    store = BackendStore(ClockedBackend(), watchdog_interval_s=None)
    yield store
    await store.close()


async def pass_time(store: BackendStore, seconds: float) -> None:
    backend = store._database.backend
    assert isinstance(backend, ClockedBackend)
    backend.time += seconds
    await store._watchdog.scan(store.now())


async def claim(store: BackendStore, worker_id: str | None, config: RolloutConfig | None = None) -> AttemptedRollout:
    await store.enqueue_rollout("a", config=config)
    claimed = await store.dequeue_rollout(worker_id)
    assert claimed is not None
    return claimed


async def latest(store: BackendStore, claimed: AttemptedRollout) -> AttemptedRollout:
    rollout = await store.get_rollout_by_id(claimed.rollout_id)
    assert isinstance(rollout, AttemptedRollout)
    return rollout


def watchdogs() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "agl-watchdog"}


async def test_the_watchdog_names_a_damaged_record_and_checks_the_other_records(
    store: BackendStore, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = await claim(store, "dead")
    record = damaged.attempt.model_copy(update={"last_heartbeat_time": "x"})
    await store._database.backend.commit([Put(record)])
    lost = await claim(store, "dead")
    for _ in range(2):
        await pass_time(store, 61)
    again = await store.dequeue_rollout("alive")
    assert again is not None
    assert again.rollout_id == lost.rollout_id
    (message,) = [entry.message for entry in caplog.records if entry.levelname == "ERROR"]
    assert damaged.attempt.attempt_id in message
    assert damaged.rollout_id in message
    assert (await store.cancel_rollout(damaged.rollout_id)).status == "cancelled"


async def test_a_rollout_whose_worker_died_before_running_it_goes_to_another_worker(store: BackendStore) -> None:
    lost = await claim(store, "dead")
    await pass_time(store, 61)
    again = await store.dequeue_rollout("alive")
    assert again is not None
    assert (again.rollout_id, again.attempt.sequence_id) == (lost.rollout_id, 2)
    first, _ = await store.query_attempts(lost.rollout_id)
    assert first.status == "unresponsive"
    assert first.error is not None
    assert "'dead'" in first.error.message
    assert first.last_heartbeat_time == first.start_time  # the end of an attempt does not count as a heartbeat
    worker = await store.get_worker_by_id("dead")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("unknown", None)


@pytest.mark.parametrize(("retry", "status"), [([], "failed"), (["unresponsive"], "requeuing")])
async def test_the_config_decides_whether_a_rollout_is_retried_after_its_running_attempt_is_lost(
    store: BackendStore, retry: list[str], status: str
) -> None:
    config = RolloutConfig.model_validate({"max_attempts": 2, "retry_condition": retry})
    lost = await claim(store, "dead", config)
    await store.update_attempt(lost.rollout_id, "latest", status="running")
    await pass_time(store, 61)
    rollout = await latest(store, lost)
    assert (rollout.status, rollout.attempt.status) == (status, "unresponsive")


async def test_heartbeats_of_a_worker_renew_the_leases_of_all_its_attempts(store: BackendStore) -> None:
    claims = [await claim(store, "worker-1") for _ in range(3)]
    for _ in range(3):
        await pass_time(store, 40)
        await store.update_worker("worker-1")
    assert [(await latest(store, item)).attempt.status for item in claims] == ["preparing"] * 3


async def test_workers_that_were_not_seen_for_a_day_are_deleted_unless_they_have_work(store: BackendStore) -> None:
    await claim(store, "busy")
    backend = store._database.backend
    await backend.commit(
        [Put(Worker(worker_id="busy", last_heartbeat_time=5.0)), Put(Worker(worker_id="gone", last_dequeue_time=5.0))]
    )
    await backend.commit([Put(Worker(worker_id="here", last_heartbeat_time=5.0 + WORKER_AGE_S))])
    assert await delete_old_workers(backend, 5.0 + WORKER_AGE_S) == 0
    assert await delete_old_workers(backend, 6.0 + WORKER_AGE_S) == 1
    assert {worker.worker_id for worker in await store.query_workers()} == {"busy", "here"}


async def test_spans_renew_the_lease(store: BackendStore) -> None:
    claimed = await claim(store, "worker-1")
    for _ in range(3):
        await pass_time(store, 40)
        span = Span.from_attributes(attributes={}, rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id)
        await store.add_span(span)
    assert (await latest(store, claimed)).status == "running"


async def test_the_lease_of_an_attempt_without_a_worker_is_renewed_by_heartbeats_of_the_attempt(
    store: BackendStore,
) -> None:
    silent, beating = await claim(store, None), await claim(store, None)
    for _ in range(3):
        await pass_time(store, 40)
        await store.update_attempt(beating.rollout_id, "latest", last_heartbeat_time=store.now())
    assert (await latest(store, beating)).attempt.status == "preparing"
    lost = await latest(store, silent)
    assert (lost.status, lost.attempt.status) == ("requeuing", "unresponsive")
    assert lost.attempt.error is not None
    assert "worker" not in lost.attempt.error.message


async def test_a_worker_that_names_its_attempts_renews_only_their_leases(store: BackendStore) -> None:
    known, unknown = await claim(store, "worker-1"), await claim(store, "worker-1")  # the response to one was lost
    for _ in range(3):
        await pass_time(store, 40)
        await store.update_worker("worker-1", attempt_ids=[known.attempt.attempt_id])
    assert (await latest(store, known)).attempt.status == "preparing"
    assert (await latest(store, unknown)).status == "requeuing"


async def test_the_watchdog_deletes_rollouts_that_the_retention_policy_does_not_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "_RETENTION_INTERVAL_S", 0.0)
    store = BackendStore(MemoryBackend(), watchdog_interval_s=0.05)
    ended = [await claim(store, None) for _ in range(6)]
    other_run = await claim(store.with_run("other"), None)
    for claimed in (*ended[:5], other_run):
        await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    store.retain(Retention(max_rollouts=3))

    async def only_has(kept: Sequence[AttemptedRollout]) -> bool:
        stored = [rollout.rollout_id for rollout in await store.query_rollouts()]
        return stored == [rollout.rollout_id for rollout in kept]

    # The last rollout is kept because it has not ended, and that of the other run because it is the newest.
    await until(lambda: only_has(ended[4:]))
    assert len(await store.query_rollouts(run_id="other")) == 1
    store.retain(Retention(max_age_s=0.0))
    await until(lambda: only_has(ended[5:]))
    await store.close()


async def test_time_limits_hold_while_a_retention_policy_works_and_closing_the_store_ends_its_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def delete_for_hours(backend: object, now: float) -> AsyncGenerator[int]:
        begun.set()
        try:
            while True:
                await asyncio.sleep(0.01)
                yield 0
        finally:
            ended.set()

    store = BackendStore(MemoryBackend(), watchdog_interval_s=0.05)
    store.retain(delete_for_hours)
    await asyncio.to_thread(begun.wait)
    late = await claim(store, None, RolloutConfig(timeout_seconds=0.05))
    (rollout,) = await store.wait_for_rollouts([late.rollout_id])
    assert rollout.status == "failed"
    assert not ended.is_set()
    await store.close()
    assert ended.is_set()


@pytest.mark.parametrize("stored", [50, 500])
async def test_a_retention_policy_with_nothing_to_delete_reads_one_page(stored: int) -> None:
    read: list[int] = []

    class CountingBackend(MemoryBackend):
        async def select(self, query: Query[R]) -> Page[R]:
            page = await super().select(query)
            read.append(len(page.rows))
            return page

    backend = CountingBackend()
    store = BackendStore(backend, watchdog_interval_s=None)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(stored)])
    for claimed in await store.dequeue_many_rollouts(limit=stored):
        await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    read.clear()
    assert await number_deleted(Retention(max_age_s=1e6, max_rollouts=stored), store, store.now()) == 0
    assert sum(read) <= 100
    with pytest.raises(ConfigError, match="watchdog_interval_s"):
        store.retain(Retention(max_rollouts=1))
    await store.close()


@pytest.mark.parametrize("policy", [{"max_age_s": -1}, {"max_rollouts": -1}, {"max_age_s": float("nan")}])
def test_an_invalid_retention_policy_is_refused(policy: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(policy))):
        Retention(**policy)


async def test_two_stores_over_one_database_end_an_attempt_once() -> None:
    backend = ClockedBackend()
    seen: list[Event] = []
    backend.watch(lambda events: seen.extend(events))
    stores = [BackendStore(backend, watchdog_interval_s=None) for _ in range(2)]
    for store in stores:
        await claim(store, None, RolloutConfig(timeout_seconds=30))
    backend.time += 31
    for _ in range(2):
        await asyncio.gather(*(store._watchdog.scan(backend.time) for store in stores))
    kinds = [event.kind for event in seen]
    assert (kinds.count("attempt_finished"), kinds.count("rollout_finished")) == (2, 2)
    for store in stores:
        await store.close()


class FlakyBackend(MemoryBackend):
    """Fails the first reads of live attempts."""

    failures = 3

    async def select(self, query: Query[R]) -> Page[R]:
        if query.kind is Attempt and query.where[0].field == "status" and self.failures:
            self.failures -= 1
            raise ConnectionError("the database is unreachable")
        return await super().select(query)


async def test_the_watchdog_survives_an_unreachable_database(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "agentlightning")
    backend = FlakyBackend()
    store = BackendStore(backend, watchdog_interval_s=0.02)
    claimed = await claim(store, None, RolloutConfig(timeout_seconds=0.05))
    (ended,) = await store.wait_for_rollouts([claimed.rollout_id])
    assert (ended.status, backend.failures) == ("failed", 0)
    assert "tries again" in caplog.text
    await store.close()


def test_a_process_that_ends_with_an_open_store_logs_no_traceback(tmp_path: Path) -> None:
    program = """
        import asyncio, logging, sys, threading, time
        from agentlightning_plugins.stores.sqlite.store import SqliteLightningStore

        async def main():
            store = SqliteLightningStore(sys.argv[1], watchdog_interval_s=0.01)
            await store.enqueue_rollout("task")
            await store.dequeue_rollout("worker")
            return store

        logging.basicConfig(stream=sys.stdout)
        store = asyncio.run(main())
        # Executors are shut down before the interpreter waits for this thread.
        threading.Thread(target=time.sleep, args=(0.3,)).start()
        print("ended")
        """
    assert run_python("-c", textwrap.dedent(program), str(tmp_path / "store.db")) == "ended\n"


async def test_suspending_the_machine_ends_no_lease_before_the_worker_had_time_for_a_heartbeat() -> None:
    backend = ClockedBackend()
    store = BackendStore(backend, watchdog_interval_s=0.005)
    claimed = await claim(store, "worker-1")
    for seconds in (0, 600):  # ten minutes pass between two scans
        backend.time += seconds
        looks = backend.looks
        await until(lambda looks=looks: backend.looks >= looks + 5)
        assert (await latest(store, claimed)).attempt.status == "preparing"
    for _ in range(8):  # the worker does not return
        backend.time += 4
        looks = backend.looks
        await until(lambda looks=looks: backend.looks >= looks + 5)
    assert (await latest(store, claimed)).attempt.status == "unresponsive"
    await store.close()


async def test_closing_a_store_ends_its_watchdog_thread_and_an_idle_store_has_no_thread() -> None:
    before = watchdogs()  # threads of other tests, which may end at any time
    store = InMemoryLightningStore()
    await store.enqueue_rollout("a")
    assert watchdogs() <= before
    await store.dequeue_rollout()
    assert len(watchdogs() - before) == 1
    await store.close()
    assert watchdogs() <= before
    await store.start_rollout("b")
    assert watchdogs() <= before


async def test_an_unreferenced_store_is_garbage_collected_and_its_watchdog_thread_ends() -> None:
    before = watchdogs()  # threads of other tests, which may end at any time
    store = InMemoryLightningStore(watchdog_interval_s=0.05)
    await store.start_rollout("a")
    assert len(watchdogs() - before) == 1
    del store
    gc.collect()
    await until(lambda: watchdogs() <= before)


async def test_the_watchdog_reads_only_live_attempts() -> None:
    looked: list[int] = []

    class CountingBackend(MemoryBackend):
        async def select(self, query: Query[R]) -> Page[R]:
            page = await super().select(query)
            looked.append(len(page.rows))
            return page

    store = BackendStore(CountingBackend(), watchdog_interval_s=None)
    for _ in range(200):
        claimed = await claim(store, None)
        await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    for _ in range(3):
        await claim(store, "worker-1")
    looked.clear()
    await store._watchdog.scan(store.now())
    assert looked == [3, 3, 1]  # attempts, rollouts and workers
    await store.close()
