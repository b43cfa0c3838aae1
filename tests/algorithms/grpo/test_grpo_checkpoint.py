"""Checkpoints: how they are written, and which weights are kept."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from agentlightning.run.directory import atomic_directory
from agentlightning_algorithms.grpo.settings import CheckpointSettings
from agentlightning_algorithms.grpo.trained_policy import CheckpointWriter
from tests.waiting import LIMIT_S


class Policies:
    """Policies whose writes wait until ``may_write`` is set."""

    def __init__(self) -> None:
        self.may_write = threading.Event()

    def save(self, directory: Path) -> None:
        (directory / "weights").touch()

    def write(self, directory: Path, state: dict[str, Any]) -> None:
        with atomic_directory(directory) as scratch:
            assert self.may_write.wait(LIMIT_S)
            (scratch / "state").write_text(str(state["step"]))


def test_a_checkpoint_is_written_in_the_background_and_awaited_before_the_weights_change(tmp_path: Path) -> None:
    policies = Policies()

    async def check() -> None:
        writer = CheckpointWriter(cast(Any, policies), tmp_path, CheckpointSettings())
        policies.may_write.set()
        await writer.begin({"step": 1}, 1)
        await writer.wait()
        assert writer.seconds is not None
        policies.may_write.clear()
        await writer.begin({"step": 2}, 2)  # returns while it is written
        waiting = asyncio.create_task(writer.wait())
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        assert (tmp_path / "checkpoint" / "state").read_text() == "1", "a kill now leaves the previous checkpoint"
        policies.may_write.set()
        await waiting
        assert (tmp_path / "checkpoint" / "state").read_text() == "2"

    asyncio.run(check())


def test_an_error_while_writing_a_checkpoint_ends_the_training(tmp_path: Path) -> None:
    policies = Policies()
    policies.may_write.set()
    (tmp_path / "file").touch()

    async def check() -> None:
        writer = CheckpointWriter(cast(Any, policies), tmp_path / "file", CheckpointSettings())
        await writer.begin({"step": 1}, 1)
        with pytest.raises(OSError, match="file"):
            await writer.wait()

    asyncio.run(check())


@pytest.mark.parametrize(("every", "kept"), [(0, []), (3, ["3", "6"])])
def test_weights_of_every_nth_step_are_kept(tmp_path: Path, every: int, kept: list[str]) -> None:
    policies = Policies()
    policies.may_write.set()

    async def check() -> None:
        writer = CheckpointWriter(cast(Any, policies), tmp_path, CheckpointSettings(keep_every=every))
        for step in range(1, 9):
            await writer.begin({"step": step} if step % 2 == 0 else None, step)
        await writer.wait()

    asyncio.run(check())
    assert sorted(path.name for path in tmp_path.glob("steps/*")) == kept
    assert all(path.joinpath("weights").is_file() for path in tmp_path.glob("steps/*"))


def test_checkpoints_become_fewer_when_a_run_waits_for_them_for_a_tenth_of_its_time(tmp_path: Path) -> None:
    writer = CheckpointWriter(cast(Any, Policies()), tmp_path, CheckpointSettings())
    every_other = CheckpointWriter(cast(Any, Policies()), tmp_path, CheckpointSettings(every=2))
    writer.waited_s = every_other.waited_s = 30.0
    assert writer.is_due(1)
    writer.waited_s = every_other.waited_s = 1e6
    assert not writer.is_due(2)
    writer._began -= 1e7
    assert writer.is_due(3)
    assert [every_other.is_due(step) for step in (1, 2)] == [False, True]
