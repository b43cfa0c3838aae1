"""examples/two_agents: one of two agents is trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.source import REPO, run_python


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_translator_learns_the_code_of_an_untrained_clerk(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = run_python(str(REPO / "examples" / "two_agents" / "two_agents.py"), "--out", str(out), timeout_s=800)
    found = re.search(r"reward (\S+) after training\n.* reward (\S+) before training, (\S+) after", said)
    assert found is not None
    trained, before, after = map(float, found.groups())
    assert before <= 0.4, "it does not know the code, and guessing earns a ninth"
    assert trained >= 0.8
    assert after >= before
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if "loss" in entry]
    assert {entry["calls_per_rollout"] for entry in steps} == {1.0}, "one of a rollout's two calls is trained on"
    assert {entry["calls_stale"] for entry in steps} == {0.0}
    assert {entry["skipped_steps"] for entry in steps} == {0.0}
