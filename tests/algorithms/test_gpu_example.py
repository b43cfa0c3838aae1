"""The GPU training script, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu"


@pytest.mark.soak
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_the_gpu_script_trains_with_and_without_correction_and_writes_a_report(tmp_path: Path, device: str) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(EXAMPLE / "train.py"), "--out", str(out), "--tiny", "--steps", "1"]
    done = subprocess.run([*command, "--device", device], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((out / "report.json").read_text())
    assert list(report["runs"]) == ["corrected", "uncorrected"]
    for run in report["runs"].values():
        assert run["status"] == "succeeded"
        assert 0 < run["logprob_gap_max"] < 0.5  # the gap is only rounding of bfloat16
        assert min(run["sampled_tokens_per_s"], run["trained_tokens_per_s"]) > 0
        assert [entry["step"] for entry in run["curve"]] == [0, 1]
    corrected, uncorrected = (run["curve"][-1] for run in report["runs"].values())
    assert 0.5 < corrected["importance_weight"] < 1.5
    assert "importance_weight" not in uncorrected
    assert (out / "report.md").read_text() in done.stdout
