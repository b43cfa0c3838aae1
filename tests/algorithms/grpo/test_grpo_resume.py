"""A training killed with SIGKILL ends like an uninterrupted one, and repeats no finished rollout."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.training_records.query import read_ledger
from tests.algorithms.grpo import grpo_program
from tests.process import wait_for

REPO = Path(__file__).parents[3]
STEPS = 3


def start(directory: Path, log: Path, staleness: int = 0) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.algorithms.grpo.grpo_program", str(directory), str(STEPS), str(staleness)],
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the trainer and all of its child processes at the same time."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def finished(directory: Path) -> dict[str, tuple[str, float | None]]:
    """Returns status and end time of every rollout, by rollout id."""
    if not (directory.parent / f"{directory.name}.db").is_file():
        return {}
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_killed_twice_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    directory, log = tmp_path / "run", tmp_path / "log"
    # Killed once after the first checkpoint, during a step's rollouts, and once while a checkpoint is written.
    process = start(directory, log)
    checkpoint = directory / "checkpoint" / "updater.pt"
    wait_for(checkpoint.is_file, process, log, timeout_s=200)
    time.sleep(0.15)
    kill(process)
    before = asyncio.run(finished(directory))
    step = torch.load(checkpoint, weights_only=True)["updates"]
    assert 1 <= step < STEPS

    process = start(directory, log)
    written = checkpoint.stat().st_mtime_ns
    scratch = directory / f".checkpoint.{process.pid}.tmp"
    wait_for(
        lambda: scratch.exists() or (checkpoint.is_file() and checkpoint.stat().st_mtime_ns > written),
        process,
        log,
        timeout_s=200,
    )
    kill(process)

    process = start(directory, log)
    assert process.wait(timeout=400) == 0, log.read_text()[-3000:]
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
            **{("train", step): 12 for step in range(STEPS)},
            ("val", 0): 4, ("val", 2): 4, ("val", 3): 4,
        }  # fmt: skip
        assert {r.status for r in rollouts} == {"succeeded"}
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
    uninterrupted = tmp_path / "uninterrupted"
    grpo_program.main(uninterrupted, STEPS)
    assert asyncio.run(rewards(directory)) == asyncio.run(rewards(uninterrupted))
    begin, killed, uninterrupted_weights = map(
        weights, (CHECKPOINT, directory / "checkpoint", uninterrupted / "checkpoint")
    )
    # Different batches round differently; training on other rows would move the weights much further apart.
    assert (killed - uninterrupted_weights).norm() < 0.02 * (uninterrupted_weights - begin).norm()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_asynchronous_training_uses_each_rollout_once(tmp_path: Path) -> None:
    directory, log = tmp_path / "run", tmp_path / "log"
    process = start(directory, log, 2)
    checkpoint = directory / "checkpoint" / "updater.pt"
    wait_for(checkpoint.is_file, process, log, timeout_s=200)
    kill(process)
    before = asyncio.run(finished(directory))
    state = torch.load(checkpoint, weights_only=True)["caller"]
    assert state["step"] < STEPS
    assert state["open_groups"], "rollouts of later steps have begun"

    process = start(directory, log, 2)
    assert process.wait(timeout=400) == 0, log.read_text()[-3000:]

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
