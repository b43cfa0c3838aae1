"""Machines with wrong clocks: leases, deadlines and attempt tokens follow the clock of the database or server."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.engine import BackendStore
from agentlightning.store.factory import create_store
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from agentlightning_plugins.stores.postgresql.store import PostgresLightningStore
from agentlightning_plugins.stores.shared.clock import ServerClock, since_boot
from tests.plugins.stores.served import ask, claim, serve
from tests.source import REPO
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main")  # about processes, not about versions of libraries

SHIFTS_S = (86_400.0, -86_400.0)
ROOTS = [str(REPO / root) for root in ("core", "plugins")]

SHIFT = f"""
import asyncio, sys, time
real, shift = time.time, float(sys.argv[1])
time.time = lambda: real() + shift
sys.path[:0] = {ROOTS!r}
"""

WORKER = (
    SHIFT
    + """
from agentlightning_plugins.stores.postgresql.store import PostgresLightningStore

async def work():
    store = PostgresLightningStore(sys.argv[2], watchdog_interval_s=0.05)
    claimed = await store.dequeue_rollout(f"worker {shift:g}")
    print("claimed", flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # meanwhile the other processes' watchdogs check this attempt
    attempt = await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded", reward=1.0)
    print(attempt.status, attempt.late_status, attempt.start_time, attempt.end_time, flush=True)
    await store.close()

asyncio.run(work())
"""
)

AGENT = (
    SHIFT
    + """
from agentlightning_plugins.stores.http.client import LightningStoreClient

async def work():
    url, token, rollout_id, attempt_id = sys.argv[2:]
    client = LightningStoreClient(url, token)
    await client.get_rollout_by_id(rollout_id)
    print(client.now() - real(), client.attempt_token(rollout_id, attempt_id, lifetime_s=3600), flush=True)
    await client.close()

asyncio.run(work())
"""
)


@asynccontextmanager
async def started(program: str, *arguments: Any) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Starts one process of the program for each wrong clock."""
    pipe = asyncio.subprocess.PIPE
    found = []
    try:
        for shift_s in SHIFTS_S:
            command = (sys.executable, "-c", program, str(shift_s), *arguments)
            found.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe))
        yield found
    finally:
        for process in found:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    text = await process.stdout.readline()
    assert text, (await process.stderr.read()).decode()
    return text.decode().strip()


async def end(process: asyncio.subprocess.Process) -> str:
    _, errors = await process.communicate(b"\n")
    assert process.returncode == 0, errors.decode()
    return errors.decode()


async def test_an_attempt_is_not_ended_by_watchdogs_of_processes_with_wrong_clocks(database: str) -> None:
    begun = time.time()
    store = PostgresLightningStore(database, watchdog_interval_s=0.05)
    config = RolloutConfig(timeout_seconds=10 * LIMIT_S, unresponsive_seconds=10 * LIMIT_S)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, config=config) for n in range(3)])
    mine = await store.dequeue_rollout("right")
    assert mine is not None
    async with started(WORKER, database) as workers:
        assert [await line(worker) for worker in workers] == ["claimed"] * len(workers)
        await asyncio.sleep(0.5)  # ten scans of each of the three watchdogs
        ended = await store.update_attempt(mine.rollout_id, mine.attempt.attempt_id, status="succeeded", reward=1.0)
        assert (ended.status, ended.late_status) == ("succeeded", None)
        for shift_s, worker in zip(SHIFTS_S, workers, strict=True):
            assert worker.stdin is not None
            worker.stdin.write(b"\n")
            status, late_status, *times = (await line(worker)).split()
            assert (status, late_status) == ("succeeded", "None"), shift_s
            start_time, end_time = map(float, times)
            latest = time.time() + LIMIT_S
            assert begun - LIMIT_S < start_time < end_time < latest, shift_s
            errors = await end(worker)
            relation = "ahead of" if shift_s > 0 else "behind"
            assert re.search(rf"the clock of this machine is \d+\.\d s {relation}", errors), errors
    attempts = [await store.query_attempts(rollout.rollout_id) for rollout in await store.query_rollouts()]
    assert [len(found) for found in attempts] == [1] * 3
    await store.close()


@pytest.mark.parametrize("moved_s", [3600.0, -3600.0])
@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
async def test_leases_and_time_limits_hold_when_the_clock_of_the_machine_is_set(
    scheme: str, moved_s: float, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://" if scheme == "memory" else f"sqlite:///{quick_path}/store.db"
    store = create_store(url)
    assert isinstance(store, BackendStore)
    assert abs(store.now() - time.time()) < LIMIT_S
    config = RolloutConfig(timeout_seconds=2 * LIMIT_S, unresponsive_seconds=2 * LIMIT_S)
    await store.enqueue_rollout("task", config=config)
    claimed = await store.dequeue_rollout("worker")
    assert claimed is not None
    before, real = store.now(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + moved_s)
    others = [store] if scheme == "memory" else [store, create_store(url)]
    for each in others:
        assert isinstance(each, BackendStore)
        assert before <= each.now() < before + LIMIT_S
        await each._watchdog.scan(each.now())
    ended = await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    assert (ended.status, ended.late_status) == ("succeeded", None)
    assert ended.start_time <= (ended.end_time or 0.0) < before + LIMIT_S
    for each in others:
        await each.close()


async def test_a_client_with_a_wrong_clock_signs_attempt_tokens_that_the_server_accepts() -> None:
    async with serve("secret") as (server, store):
        rollout = await claim(store)
        async with started(AGENT, server.endpoint, "secret", rollout.rollout_id, rollout.attempt.attempt_id) as agents:
            for shift_s, agent in zip(SHIFTS_S, agents, strict=True):
                error_s, token = (await line(agent)).split()
                assert abs(float(error_s)) < LIMIT_S  # at most the time of the request
                assert "the clock of this machine is" in await end(agent)
                status, _ = await ask(server, "GET", f"/v1/agl/rollouts/{rollout.rollout_id}", token=token)
                assert status == 200, shift_s


def test_the_clock_of_the_server_does_not_follow_a_change_of_this_machines_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ServerClock("https://store")
    assert clock.is_due
    clock.set(1000.0, since_boot())
    assert not clock.is_due
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert 1000.0 <= clock.now() < 1000.0 + LIMIT_S


def test_a_slow_answer_causes_no_warning_about_a_wrong_clock(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "agentlightning")
    ServerClock("https://store").set(time.time(), since_boot() - 5)  # the answer took up to 5 s
    assert not caplog.records
    ServerClock("https://store").set(time.time() - 3, since_boot())
    assert "ahead of" in caplog.text
