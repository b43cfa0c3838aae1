"""A training killed with SIGKILL ends like an uninterrupted one, and repeats no finished rollout."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.runner import LitAgentRunner
from agentlightning_algorithms.grpo.collector import RolloutCollector
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.training_records.query import read_ledger
from tests.algorithms.grpo import grpo_program
from tests.algorithms.killed_process import end_leases
from tests.source import REPO
from tests.waiting import LIMIT_S, until

STEPS = 3
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("server_thread")]


@pytest.fixture(scope="module")
def forks() -> Iterator[Any]:
    """Starts processes as forks of one that has imported torch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([grpo_program.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))
        yield context
    forkserver._forkserver._stop()  # its process would stay until the end of all tests


def train_until_killed(forks: Any, directory: Path, staleness: int, dies: str) -> None:
    log = directory.with_suffix(".log")
    process = forks.Process(
        target=grpo_program.main_until_killed, args=(log, directory, STEPS, staleness, dies), daemon=True
    )
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL, log.read_text()[-8000:]
    asyncio.run(end_leases(directory.with_suffix(".db")))


async def finished(directory: Path) -> dict[str, tuple[str, float | None]]:
    """Returns status and end time of every rollout, by rollout id."""
    store = agl.create_store(f"sqlite:///{directory.parent}/{directory.name}.db")
    try:
        return {r.rollout_id: (r.status, r.end_time) for r in (await store.query_rollouts()).items}
    finally:
        await store.close()


async def rewards(directory: Path) -> list[dict[str, float]]:
    """Returns the rewards and sizes of every step, in training and in evaluation."""
    store = agl.create_store(f"sqlite:///{directory.parent}/{directory.name}.db")
    try:
        steps = (await store.query_metrics()).items
    finally:
        await store.close()
    names = ("reward", "val_reward", "calls", "response_length", "rows")
    return [{name: step.values[name] for name in names if name in step.values} for step in steps]


def weights(directory: Path) -> torch.Tensor:
    return torch.cat([value.float().flatten() for value in load_file(directory / "model.safetensors").values()])


@pytest.fixture
def queue_is_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runners run all queued rollouts between the first and the second publication of weights."""
    publish, work = RolloutCollector.publish, LitAgentRunner.iter
    published = threading.Event()

    async def publish_around_the_queue(self: RolloutCollector) -> None:
        async def is_empty() -> bool:
            return not await self.store.query_rollouts(status_in=["queuing", "requeuing", "preparing", "running"])

        if published.is_set():
            await until(is_empty)
        await publish(self)
        published.set()

    async def work_later(self: Any, event: Any = None) -> None:
        await asyncio.to_thread(published.wait, LIMIT_S)
        await work(self, event)

    monkeypatch.setattr(RolloutCollector, "publish", publish_around_the_queue)
    monkeypatch.setattr(LitAgentRunner, "iter", work_later)


@pytest.mark.soak
@pytest.mark.usefixtures("queue_is_run_first")  # with rollouts of the killed run and its address
def test_a_training_killed_twice_ends_like_an_uninterrupted_one(forks: Any, tmp_path: Path) -> None:
    directory, uninterrupted = tmp_path / "run", tmp_path / "uninterrupted"
    checkpoint = directory / "checkpoint" / "updater.pt"
    train_until_killed(forks, directory, 0, "rollouts")
    before = asyncio.run(finished(directory))
    assert torch.load(checkpoint, weights_only=True)["updates"] == 1
    train_until_killed(forks, directory, 0, "checkpoint")
    assert torch.load(checkpoint, weights_only=True)["updates"] == 1
    assert list(directory.glob(".checkpoint.tmp")), "the second kill was while a checkpoint was written"
    grpo_program.main(directory, STEPS)
    state = torch.load(checkpoint, weights_only=True)
    assert state["updates"] == state["caller"]["step"] == STEPS
    assert state["caller"]["position"] == 3 * STEPS

    async def check() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path}/run.db")
        try:
            rollouts = (await store.query_rollouts()).items
            metrics = (await store.query_metrics()).items
            latest = await store.get_latest_resources()
        finally:
            await store.close()
        assert [item.step for item in metrics] == list(range(STEPS + 1))
        assert all("loss" in item.values and item.values["rollouts"] == 12 for item in metrics[1:])
        assert {item.step for item in metrics if "val_reward" in item.values} == {0, 2, 3}
        counted = Counter((r.mode, (r.metadata or {})["step"]) for r in rollouts)
        assert counted == {
            **{("train", step + 1): 12 for step in range(STEPS)},
            ("val", 0): 4, ("val", 2): 4, ("val", 3): 4,
        }  # fmt: skip
        assert [r for r in rollouts if r.status != "succeeded"] == []
        ended = {r.rollout_id: (r.status, r.end_time) for r in rollouts}
        for rollout_id, (status, end_time) in before.items():
            if status == "succeeded":
                assert ended[rollout_id] == (status, end_time)  # and was not run again
        assert latest is not None

    asyncio.run(check())
    assert len(json.loads((directory / "run.json").read_text())["resumed_at"]) == 2
    assert not list(directory.glob("*.tmp")), "scratch directories of the killed process are removed"
    assert not list(directory.glob(".*.tmp"))

    # A run with the same seed that is not killed.
    grpo_program.main(uninterrupted, STEPS)
    assert asyncio.run(rewards(directory)) == asyncio.run(rewards(uninterrupted))
    begin, killed, uninterrupted_weights = map(
        weights, (CHECKPOINT, directory / "checkpoint", uninterrupted / "checkpoint")
    )
    # Different batches round differently; training on other rows would move the weights much further apart.
    assert (killed - uninterrupted_weights).norm() < 0.02 * (uninterrupted_weights - begin).norm()


def test_a_killed_asynchronous_training_uses_each_rollout_once(forks: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    checkpoint = directory / "checkpoint" / "updater.pt"
    train_until_killed(forks, directory, 2, "rollouts")
    before = asyncio.run(finished(directory))
    state = torch.load(checkpoint, weights_only=True)["caller"]
    assert state["step"] == 1
    assert state["open_groups"], "rollouts of later steps have begun"
    grpo_program.main(directory, STEPS, 2)

    async def check() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path}/run.db")
        try:
            rollouts = [each for each in (await store.query_rollouts()).items if each.mode == "train"]
            entries = await read_ledger(store)
        finally:
            await store.close()
        assert Counter(entry.rollout_id for entry in entries) == Counter(each.rollout_id for each in rollouts)
        used = [entry for entry in entries if entry.outcome not in ("stale", "cancelled")]
        assert Counter(entry.step for entry in used) == dict.fromkeys(range(1, STEPS + 1), 12)
        assert {entry.outcome for entry in used} <= {"trained", "flat_group"}
        ended = {each.rollout_id: (each.status, each.end_time) for each in rollouts}
        for rollout_id, (status, end_time) in before.items():
            if status == "succeeded" and rollout_id in ended:
                assert ended[rollout_id] == (status, end_time)  # and was not run again

    asyncio.run(check())
    assert torch.load(checkpoint, weights_only=True)["updates"] == STEPS
