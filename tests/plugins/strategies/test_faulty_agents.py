"""The strategy `cs` with agents that end their process or block its event loop, and runners that die on their own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.run import heartbeat
from agentlightning.types import AttemptedRollout
from agentlightning_plugins.shared.processes import supervisor
from agentlightning_plugins.shared.processes.supervisor import Ending
from tests import waiting
from tests.waiting import blocking_until


def trainer(**settings: Any) -> agl.Trainer:
    return agl.Trainer(**{"algorithm": "baseline", "tracer": "dummy", "trackers": [], **settings})


async def ended(store: agl.LightningStore) -> dict[int, AttemptedRollout]:
    """Returns the rollouts by the number of their task."""
    rollouts = (await store.query_rollouts()).items
    return {rollout.input["number"]: rollout for rollout in rollouts if isinstance(rollout, AttemptedRollout)}


def killer(task: dict[str, Any]) -> float:
    time.sleep(0.05)  # until concurrent tasks have begun
    if task["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return 1.0


def test_only_tasks_that_kill_their_process_fail_and_resuming_runs_no_task_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
    tasks = [{"number": number, "kills": number in (2, 5)} for number in range(8)]
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "store": f"sqlite:///{tmp_path / 'store.db'}"}
    store = agl.create_store(f"sqlite:///{tmp_path / 'store.db'}", run="run")
    for resume in (False, True):
        run = trainer(**settings, resume=resume).fit(killer, tasks)
        assert run.status == "succeeded"
        rollouts = asyncio.run(ended(store))
        assert {number: rollout.status for number, rollout in rollouts.items()} == {
            task["number"]: "failed" if task["kills"] else "succeeded" for task in tasks
        }
        for number in (2, 5):
            error = rollouts[number].attempt.error
            assert error is not None
            assert "5 workers died before the first span" in error.message
            assert f"'number': {number}" in error.message
        deaths = [record for record in caplog.records if "died (signal SIGKILL)" in record.message]
        assert 8 <= len(deaths) <= 10, "two with concurrent tasks, then three with each of the two tasks alone"
    asyncio.run(store.close())


def test_an_agent_that_always_kills_its_process_ends_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_DEATHS", 3)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
    tasks = [{"number": number, "kills": True} for number in range(50)]
    with pytest.raises(RuntimeError, match=r"died 4 times in a row, and no rollout succeeded .*signal SIGKILL"):
        trainer().fit(killer, tasks)


class FailingRunners:
    """Runners that die without a rollout."""

    def __init__(self) -> None:
        self.n_starts = 0

    async def run(self, worker_id: str) -> Ending:
        self.n_starts += 1
        return Ending("died", "exit code 1")


@pytest.mark.parametrize(("quick_s", "expected"), [(10.0, supervisor._QUICK_DEATHS), (0.0, supervisor._DEATHS)])
async def test_a_runner_that_dies_repeatedly_ends_the_run_whether_it_dies_quickly_or_slowly(
    monkeypatch: pytest.MonkeyPatch, quick_s: float, expected: int
) -> None:
    monkeypatch.setattr(supervisor, "_QUICK_DEATH_S", quick_s)
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
    runners = FailingRunners()
    with pytest.raises(RuntimeError, match=rf"died {expected + 1} times in a row.*exit code 1"):
        await supervisor.Supervisor(runners, agl.InMemoryLightningStore(), 1).run()
    assert runners.n_starts == expected + 1


class CountingStore(agl.InMemoryLightningStore):
    """Counts the heartbeats of runners."""

    n_beats = 0

    async def update_worker(self, *args: Any, **kwargs: Any) -> agl.Worker:
        self.n_beats += 1
        return await super().update_worker(*args, **kwargs)


def test_an_async_agent_that_blocks_its_event_loop_is_reported_while_its_runner_sends_heartbeats(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_REPORT_AFTER_S", 0.2)
    monkeypatch.setattr(heartbeat, "_CHECK_S", 0.05)
    store = CountingStore()

    async def blocker(task: dict[str, Any]) -> float:
        begun = store.n_beats
        if task["number"] == 3:
            blocking_until(lambda: "has blocked the event loop" in caplog.text and store.n_beats > begun + 3)
        await asyncio.sleep(0)
        return 1.0

    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.DummyTracer(), heartbeat_interval=0.05)
    tasks = [{"number": number} for number in range(8)]
    assert trainer(store=store, runner=runner, strategy="shm").fit(blocker, tasks).status == "succeeded"
    rollouts = asyncio.run(ended(store))
    assert [(rollout.status, rollout.attempt.sequence_id) for rollout in rollouts.values()] == [("succeeded", 1)] * 8
    attempt = rollouts[3].attempt
    worker = re.escape(str(attempt.worker_id))
    place = rf"at {re.escape(waiting.__file__)}:\d+ in blocking_until: "
    blocked = rf"the agent of {attempt.attempt_id} has blocked the event loop of worker {worker} for \d+ s, {place}"
    assert re.search(blocked, caplog.text)
