"""Each train_gpu.yaml of the examples trains a step on the CPU: only model, data and device differ from a GPU's run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentlightning_plugins.commands.train import command
from tests.algorithms.server_thread import threads_for_servers
from tests.source import REPO

FILES = sorted((REPO / "examples").glob("*/train_gpu.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_the_configuration_for_a_gpu_trains_on_a_cpu(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = file.parent.name
    here = ("model=checkpoint", "device=cpu", "dtype=float32", "sampling.max_tokens=24")
    short = ("steps=1", "tasks_per_step=2", "rollouts_per_task=4", "eval_every=0", "update.warmup_updates=0")
    gradient = (
        "experience.keep_flat_groups=true",
        "update.entropy_coefficient=0.01",
    )  # even if no rollout earns a reward
    overrides = [f"algorithm.{setting}" for setting in (*here, *short, *gradient)]
    overrides += [
        f"data.{split}={{source: 'examples.{example}.problems:{split}', limit: 4}}" for split in ("train", "val")
    ]
    monkeypatch.chdir(REPO)
    with threads_for_servers():
        done = CliRunner().invoke(command, [str(file), *overrides, "--run-dir", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    [step] = [found for found in map(json.loads, lines) if found.get("step") == 1]
    assert step["rollouts"] == 8.0
    assert step["rollouts_without_reward"] == 0.0
    assert step["grad_norm"] > 0.0
    assert (tmp_path / "run" / "checkpoint").is_dir()
