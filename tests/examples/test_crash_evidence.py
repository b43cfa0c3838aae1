"""examples/crash_evidence.py: a training that is killed and resumed equals the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import crash_evidence

from tests.source import REPO, run_python


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_training_that_is_killed_three_times_has_the_curve_of_the_undisturbed_one(tmp_path: Path) -> None:
    arguments = ("math", "--out", str(tmp_path), "--steps", "8", "--kills", "3")
    said = run_python("-m", "examples.crash_evidence", *arguments, cwd=REPO, timeout_s=1700)
    assert "| killed and resumed |" in said
    undisturbed, killed = (crash_evidence.read_steps(tmp_path / "math" / name) for name in ("undisturbed", "killed"))
    assert set(undisturbed) == set(range(9))
    for name in crash_evidence.COMPARED:
        assert crash_evidence.largest_difference(undisturbed, killed, name) < 1e-3, name


def test_a_missing_step_is_an_infinite_difference() -> None:
    steps = {0: {"val_reward": 0.5}, 1: {"reward": 0.25, "loss": 1.0}}
    assert crash_evidence.largest_difference(steps, steps, "reward") == 0.0
    assert crash_evidence.largest_difference(steps, {0: steps[0]}, "reward") == float("inf")
    assert crash_evidence.largest_difference(steps, {0: {"val_reward": 0.75}, 1: steps[1]}, "val_reward") == 0.25
    text = crash_evidence.describe(steps, {1: steps[1]}, [1], "command")
    assert "| killed and resumed | missing |" in text
