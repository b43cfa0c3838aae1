"""examples/crash_evidence.py: a training that is killed and resumed equals an undisturbed one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from examples import crash_evidence

from tests.source import REPO, run_python


@pytest.mark.soak
def test_a_training_killed_three_times_has_the_same_curve_as_an_undisturbed_one(tmp_path: Path) -> None:
    arguments = ("math", "--out", str(tmp_path), "--steps", "8", "--kills", "3")
    said = run_python("-m", "examples.crash_evidence", *arguments, cwd=REPO, timeout_s=1700)
    assert "| killed and resumed |" in said
    undisturbed, killed = (crash_evidence.read_steps(tmp_path / "math" / name) for name in ("undisturbed", "killed"))
    assert set(undisturbed) == set(range(9))
    for name in crash_evidence.COMPARED:
        assert crash_evidence.largest_difference(undisturbed, killed, name) < 1e-3, name


@pytest.fixture
def training() -> Iterator[subprocess.Popen[bytes]]:
    """A long-running process in place of a training."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True) as process:
        yield process
        process.kill()


def press_ctrl_c(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_ctrl_c_while_waiting_for_a_training_kills_it(
    training: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([press_ctrl_c, training.wait])
    monkeypatch.setattr(training, "wait", lambda: next(waits)())
    with pytest.raises(KeyboardInterrupt):
        crash_evidence.finish(training)
    assert training.poll() == -signal.SIGKILL


def test_ctrl_c_before_the_planned_kill_of_a_training_kills_it(
    training: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(crash_evidence, "train", lambda *_: training)
    monkeypatch.setattr(crash_evidence, "time", SimpleNamespace(sleep=press_ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        crash_evidence.train_and_kill("math", tmp_path, [], [1])
    assert training.poll() == -signal.SIGKILL


def test_a_missing_step_counts_as_an_infinite_difference() -> None:
    steps = {0: {"val_reward": 0.5}, 1: {"reward": 0.25, "loss": 1.0}}
    assert crash_evidence.largest_difference(steps, steps, "reward") == 0.0
    assert crash_evidence.largest_difference(steps, {0: steps[0]}, "reward") == float("inf")
    assert crash_evidence.largest_difference(steps, {0: {"val_reward": 0.75}, 1: steps[1]}, "val_reward") == 0.25
    text = crash_evidence.describe(steps, {1: steps[1]}, [1], "command")
    assert "| killed and resumed | missing |" in text
