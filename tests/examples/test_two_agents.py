"""examples/two_agents: both agents are trained, each with its own weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.source import REPO, run_python


def run(out: Path, *options: str) -> tuple[list[dict[str, Any]], tuple[float, ...]]:
    """Runs the example and returns the metrics of its steps and the three rewards that it prints."""
    said = run_python(
        str(REPO / "examples" / "two_agents" / "two_agents.py"), "--out", str(out), *options, timeout_s=800
    )
    found = re.search(r"reward (\S+) after training\n.* reward (\S+) before training, (\S+) after", said)
    assert found is not None
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if "translator/rows" in entry]
    return steps, tuple(map(float, found.groups()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_agents_train_separate_weights(tmp_path: Path) -> None:
    steps, _ = run(tmp_path / "out", "--steps", "2")
    assert [entry["step"] for entry in steps] == [1, 2]
    for entry in steps:
        assert entry["calls_per_rollout"] == 2.0
        for agent in ("translator", "clerk"):
            assert entry[f"{agent}/calls_per_rollout"] == 1.0
            assert entry[f"{agent}/optimizer_steps"] > 0
            assert entry[f"{agent}/skipped_steps"] == entry[f"{agent}/calls_stale"] == 0
            assert entry[f"{agent}/logprob_gap_max"] < 1e-3
    saved = tmp_path / "out" / "run" / "checkpoint"
    one, other = (load_file(saved / agent / "adapter_model.safetensors") for agent in ("translator", "clerk"))
    assert one.keys() == other.keys()
    assert all(not one[name].equal(other[name]) for name in one)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_translator_and_a_clerk_learn_to_cooperate(tmp_path: Path) -> None:
    _, (trained, before, after) = run(tmp_path / "out")
    assert before <= 1 / 3
    assert trained >= 0.8, "if only one agent learned, at most a third of the orders would be filled"
    assert after >= before
