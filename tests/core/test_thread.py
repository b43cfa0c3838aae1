"""Calls that an async agent makes in threads of its loop's default executor end with the attempt."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.run.thread import ThreadGroup, ThreadStopped, install_group_executor, thread_group
from tests.waiting import LIMIT_S, until


@pytest.fixture
async def store() -> AsyncIterator[agl.InMemoryLightningStore]:
    store = agl.InMemoryLightningStore()
    yield store
    await store.close()


class Work:
    """A call that takes minutes unless it is stopped."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.stopped = threading.Event()

    def __call__(self, *args: Any) -> None:
        self.began.set()
        try:
            for _ in range(10_000):
                time.sleep(0.01)
        except ThreadStopped:
            self.stopped.set()
            raise


async def begin(work: Work, by: str) -> None:
    if by == "run_in_executor":
        await asyncio.get_running_loop().run_in_executor(None, work)
    else:
        await asyncio.to_thread(work)


@pytest.mark.parametrize("call", ["run_in_executor", "to_thread"])
@pytest.mark.parametrize("by", ["timeout", "cancellation", "error beside it"])
async def test_a_call_in_a_thread_stops_with_the_attempt(store: agl.InMemoryLightningStore, call: str, by: str) -> None:
    work = Work()

    async def agent(task: str) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(begin(work, call))
            await until(work.began.is_set, LIMIT_S)
            if by == "error beside it":
                raise LookupError("down")

    rollout = await store.enqueue_rollout("t", config=agl.RolloutConfig(timeout_seconds=1 if by == "timeout" else None))
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=1)
    with runner.run_context(agent=agl.wrap(agent), store=store):
        running = asyncio.create_task(runner.iter())
        if by == "cancellation":
            await until(work.began.is_set, LIMIT_S)
            await store.cancel_rollout(rollout.rollout_id)
        await asyncio.wait_for(running, LIMIT_S)
    await until(work.stopped.is_set, LIMIT_S)
    ended = await store.get_rollout_by_id(rollout.rollout_id)
    assert ended is not None
    assert ended.status == ("cancelled" if by == "cancellation" else "failed")


async def test_hanging_calls_leave_threads_to_other_attempts_and_mark_the_runner_as_worn_out(
    store: agl.InMemoryLightningStore,
) -> None:
    release, all_hang = threading.Event(), threading.Barrier(41)

    def hang() -> None:
        all_hang.wait(LIMIT_S)
        release.wait(2 * LIMIT_S)

    async def agent(task: str) -> float:
        if task == "hang":
            await asyncio.to_thread(hang)
        return float(await asyncio.to_thread(len, task))

    hanging = [await store.enqueue_rollout("hang") for _ in range(40)]
    other = await store.enqueue_rollout("four")
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), max_rollouts=41, max_concurrency=41)
    try:
        with runner.run_context(agent=agl.wrap(agent), store=store):
            running = asyncio.create_task(runner.iter())
            await asyncio.to_thread(all_hang.wait, LIMIT_S)
            (ended,) = await store.wait_for_rollouts([other.rollout_id], timeout=LIMIT_S)
            assert ended.status == "succeeded"
            for rollout in hanging:
                await store.cancel_rollout(rollout.rollout_id)
            await asyncio.wait_for(running, LIMIT_S)
        assert runner.is_worn_out
    finally:
        release.set()


async def test_a_thread_group_runs_more_calls_than_threads_each_in_the_context_of_its_caller() -> None:
    install_group_executor()
    name: ContextVar[int] = ContextVar("name")
    most = 0
    at_work = 0
    lock = threading.Lock()

    def look() -> int:
        nonlocal most, at_work
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.01)
        with lock:
            at_work -= 1
        return name.get()

    async def call(number: int) -> int:
        name.set(number)
        return await asyncio.get_running_loop().run_in_executor(None, look)

    async def fail() -> None:
        await asyncio.to_thread(int, "no number")

    with thread_group(on_abandoned=lambda threads: None):
        assert await asyncio.gather(*(call(number) for number in range(100))) == list(range(100))
        with pytest.raises(ValueError, match="no number"):
            await fail()
    assert 1 < most <= 32


async def test_an_exception_that_a_future_cannot_hold_becomes_a_runtime_error() -> None:
    def fail() -> None:
        raise StopIteration(3)

    install_group_executor()
    with thread_group(on_abandoned=lambda threads: None), pytest.raises(RuntimeError, match="StopIteration: 3"):
        await asyncio.wait_for(asyncio.to_thread(fail), LIMIT_S)


def test_a_stopped_thread_group_starts_no_more_calls() -> None:
    group, work = ThreadGroup(), [Work() for _ in range(40)]
    futures = [group.submit(one) for one in work]
    assert all(one.began.wait(LIMIT_S) for one in work[:32])
    threads = group.stop()
    assert len(threads) == 32
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert [one.stopped.is_set() for one in work] == [True] * 32 + [False] * 8
    assert all(future.cancelled() for future in [*futures[32:], group.submit(work[0])])


def test_stopping_a_thread_group_at_any_moment_leaves_no_thread_and_no_warning() -> None:
    """A thread may be stopped while it takes its next call; warnings of threads are errors in these tests."""

    def pause(seconds: float) -> Callable[[], None]:
        return lambda: time.sleep(seconds)

    threads = []
    for number in range(200):
        group = ThreadGroup()
        for _ in range(3):
            group.submit(pause(number * 1e-6))
        time.sleep(number * 1e-6)
        threads += group.stop()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_thread_that_is_stopped_at_any_moment_closes_the_event_loop_of_asyncio_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = sys.unraisablehook

    def report(error: Any) -> None:
        if error.exc_type is not ThreadStopped:  # which Python drops in a callback of a weak reference
            hook(error)

    monkeypatch.setattr(sys, "unraisablehook", report)

    async def work() -> None:
        await asyncio.create_task(asyncio.sleep(0))

    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():  # a dropped error does not end it
            asyncio.run(work())

    threads = []
    for number in range(150):
        group = ThreadGroup()
        group.submit(run)
        time.sleep(0.002 + number * 2e-5)
        threads += group.stop()
    is_over.set()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    gc.collect()  # warnings, such as that of a loop that was not closed, are errors in these tests


async def test_the_default_executor_of_a_program_keeps_running_calls_outside_of_attempts() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="chosen") as chosen:
        asyncio.get_running_loop().set_default_executor(chosen)
        install_group_executor()
        install_group_executor()
        assert (await asyncio.to_thread(threading.current_thread)).name.startswith("chosen")
        with thread_group(on_abandoned=lambda threads: None):
            assert (await asyncio.to_thread(threading.current_thread)).name.startswith("agent-call")
        await asyncio.get_running_loop().shutdown_default_executor()
        with pytest.raises(RuntimeError, match="after shutdown"):
            chosen.submit(len, "")


class SharedLock:
    """A lock whose ``__enter__`` takes time after it has the lock, as httpcore's has some bytecodes left."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_taken = self.may_return = False

    def __enter__(self) -> None:
        self.lock.acquire()
        self.is_taken = True
        while not self.may_return:
            pass

    def __exit__(self, *_: object) -> None:
        self.lock.release()


async def test_a_thread_that_is_stopped_leaves_no_lock_taken() -> None:
    shared, group = SharedLock(), ThreadGroup()

    def work() -> None:
        with shared:
            while True:
                time.sleep(0.01)

    future = group.submit(work)
    await until(lambda: shared.is_taken)
    group.stop()
    shared.may_return = True
    with pytest.raises(ThreadStopped):
        await asyncio.wrap_future(future)
    assert not shared.lock.locked()


async def test_a_thread_is_not_stopped_while_it_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would stop the new one, for whose first step the other waits."""
    start, held = threading._start_new_thread, threading.Event()
    child, began, has_started = threading.Thread(target=lambda: None), threading.Event(), threading.Event()

    def start_later(bootstrap: Any, arguments: tuple[()]) -> None:
        if bootstrap.__self__ is child:
            threading.Thread(target=lambda: held.wait(LIMIT_S) and start(bootstrap, arguments)).start()
            began.set()
        else:
            start(bootstrap, arguments)

    def work() -> None:
        child.start()
        has_started.set()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(threading, "_start_new_thread", start_later)
    group = ThreadGroup()
    future = group.submit(work)
    await until(began.is_set)
    group.stop()
    held.set()
    with pytest.raises(ThreadStopped):
        await asyncio.wrap_future(future)
    assert has_started.is_set()
    child.join(LIMIT_S)
