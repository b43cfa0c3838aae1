"""Each train_gpu.yaml of the examples trains a step on the CPU: only model, data and device differ from a GPU's run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.source import REPO, run_python

FILES = sorted((REPO / "examples").glob("*/train_gpu.yaml"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_the_configuration_for_a_gpu_trains_on_a_cpu(file: Path, tmp_path: Path) -> None:
    example = file.parent.name
    here = (f"model=examples/{example}/checkpoint", "device=cpu", "dtype=float32", "sampling.max_tokens=24")
    short = ("steps=1", "tasks_per_step=4", "rollouts_per_task=4", "eval_every=0", "keep_flat_groups=true")
    overrides = [f"data.{split}=examples.{example}.problems:{split}" for split in ("train", "val")]
    overrides += [f"algorithm.{setting}" for setting in (*here, *short)]
    run = ("--run-dir", str(tmp_path / "run"))
    run_python("-m", "agentlightning", "train", os.fspath(file), *overrides, *run, cwd=REPO, timeout_s=280)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    [step] = [found for found in map(json.loads, lines) if found.get("step") == 1]
    assert step["rollouts"] == 16.0
    assert step["rollouts_without_reward"] == 0.0
    assert step["grad_norm"] > 0.0
    assert (tmp_path / "run" / "checkpoint").is_dir()
