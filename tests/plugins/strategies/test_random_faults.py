"""Runners that are killed and suspended at random, over each kind of store: every rollout succeeds exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig
from tests.postgresql import PostgresServer, running_server

LEASE_S = 3.0


def agent(task: dict[str, Any]) -> float:
    agl.emit_annotation({"number": task["number"]})
    Path(task["pids"], str(os.getpid())).touch()
    time.sleep(0.1)
    return float(task["number"])


class Faults(threading.Thread):
    """Sends SIGKILL, or SIGSTOP and later SIGCONT, to processes that have run the agent."""

    def __init__(self, pids: Path, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._draw = random.Random(seed)
        self._count = count
        self._over = threading.Event()
        self.kinds: list[str] = []

    def run(self) -> None:
        while len(self.kinds) < self._count and not self._over.wait(self._draw.uniform(0.05, 0.4)):
            names = sorted(path.name for path in self._pids.iterdir())
            if not names:
                continue
            pid = int(self._draw.choice(names))
            with contextlib.suppress(ProcessLookupError):
                if self._draw.random() < 0.6:
                    (self._pids / str(pid)).unlink(missing_ok=True)
                    os.kill(pid, signal.SIGKILL)
                    self.kinds.append("kill")
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.kinds.append("stop")
                    self._over.wait(self._draw.choice([0.2, 0.5, 1.5 * LEASE_S]))
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        self._over.set()
        self.join()


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with running_server(Path("/tmp")) as server:  # the path of its socket must be short
        yield server


def run_with_faults(store: agl.LightningStore, strategy: str, folder: Path, n_faults: int) -> list[str]:
    """Enqueues tasks until ``n_faults`` faults have happened, checks the rollouts and returns the kinds of faults."""
    pids = folder / "pids"
    pids.mkdir()
    faults = Faults(pids, n_faults, seed=n_faults)
    config = RolloutConfig(max_attempts=1000, retry_condition=["unresponsive"])
    numbers: list[int] = []

    @agl.algo
    async def algorithm(store: agl.LightningStore) -> None:
        faults.start()
        while len(faults.kinds) < n_faults:
            batch = [len(numbers) + index for index in range(20)]
            requests = [
                EnqueueRolloutRequest(input={"number": number, "pids": str(pids)}, config=config) for number in batch
            ]
            queued = await store.enqueue_many_rollouts(requests)
            numbers.extend(batch)
            await store.wait_for_rollouts([rollout.rollout_id for rollout in queued])

    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.OtelTracer(), heartbeat_interval=0.5, max_concurrency=4)
    trainer = agl.Trainer(
        algorithm=algorithm, store=store, runner=runner, strategy={"name": strategy, "n_runners": 3}, trackers=[]
    )
    try:
        assert trainer.fit(agent).status == "succeeded"
    finally:
        faults.stop()
    asyncio.run(check(store, numbers))
    return faults.kinds


async def check(store: agl.LightningStore, numbers: list[int]) -> None:
    rollouts = [rollout async for rollout in every_rollout(store)]
    assert sorted(rollout.input["number"] for rollout in rollouts) == numbers
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    for rollout in rollouts:
        attempts = (await store.query_attempts(rollout.rollout_id)).items
        assert [attempt.status for attempt in attempts].count("succeeded") == 1
        assert rollout.attempt.reward == float(rollout.input["number"])
        spans = (await store.query_spans(rollout.rollout_id, "latest")).items
        assert len({span.span_id for span in spans}) == len(spans)
        assert agl.find_final_reward(spans) == float(rollout.input["number"])


async def every_rollout(store: agl.LightningStore) -> Any:
    offset = 0
    while items := (await store.query_rollouts(limit=200, offset=offset)).items:
        for rollout in items:
            assert isinstance(rollout, AttemptedRollout)
            yield rollout
        offset += len(items)


def open_store(kind: str, folder: Path, postgresql: PostgresServer | None = None) -> agl.LightningStore:
    settings: dict[str, Any] = {"lease_s": LEASE_S, "watchdog_interval_s": 0.3}
    if kind == "memory":
        return agl.InMemoryLightningStore(lease_s=LEASE_S)
    if kind == "sqlite":
        from agentlightning_plugins.stores.sqlite.store import SqliteLightningStore

        return SqliteLightningStore(folder / "store.db", **settings)
    assert postgresql is not None
    from agentlightning_plugins.stores.postgresql.store import PostgresLightningStore

    return PostgresLightningStore(postgresql.url(postgresql.lend_database()), **settings)


def test_every_rollout_succeeds_exactly_once_although_runners_are_killed_and_suspended(tmp_path: Path) -> None:
    store = open_store("sqlite", tmp_path)
    assert len(run_with_faults(store, "cs", tmp_path, 5)) == 5
    asyncio.run(store.close())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "strategy"), [("memory", "cs"), ("sqlite", "cs"), ("postgresql", "cs"), ("memory", "ray")]
)
def test_every_rollout_succeeds_exactly_once_after_a_hundred_random_faults(
    kind: str, strategy: str, tmp_path: Path, postgresql: PostgresServer
) -> None:
    store = open_store(kind, tmp_path, postgresql)
    assert len(run_with_faults(store, strategy, tmp_path, 100)) == 100
    asyncio.run(store.close())
