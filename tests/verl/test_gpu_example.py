"""The GPU training script for verl, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu"


@pytest.mark.soak
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_gpu_script_trains_with_verl_and_writes_a_report(tmp_path: Path, device: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(EXAMPLE / "train_verl.py"), "--out", str(out), "--tiny", "--steps", "1"]
    log = tmp_path / "log"
    with log.open("w") as file:
        done = subprocess.run([*command, "--device", device], stdout=file, stderr=file, cwd=tmp_path, check=False)
    assert done.returncode == 0, log.read_text()[-3000:]
    run = json.loads((out / "report.json").read_text())["run"]
    assert run["status"] == "succeeded"
    (step,) = [entry for entry in run["curve"] if "reward" in entry]
    assert min(step["sampled_tokens_per_s"], step["trained_tokens_per_s"], step["step_s"]) > 0
    assert step["gap_of_probabilities"] < (1e-5 if device == "cpu" else 0.5)  # bfloat16 rounding only
    assert "| 1 |" in (out / "report.md").read_text()
