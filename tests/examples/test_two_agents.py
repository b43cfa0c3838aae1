"""examples/two_agents: of two agents the one is trained, and learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.source import REPO, run_python


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_translator_learns_what_a_clerk_understands_who_is_not_trained(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = run_python(str(REPO / "examples" / "two_agents" / "two_agents.py"), "--out", str(out), timeout_s=800)
    found = re.search(r"reward (\S+) in the end\n.* reward (\S+) before, (\S+) after", said)
    assert found is not None
    trained, before, after = map(float, found.groups())
    assert before <= 0.4, "nobody has told it the code: a ninth is what guessing earns"
    assert trained >= 0.8
    assert after >= before
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if "loss" in entry]
    assert {entry["calls_per_rollout"] for entry in steps} == {1.0}, "a rollout has two calls, and one is learned from"
    assert {entry["calls_stale"] for entry in steps} == {0.0}
    assert {entry["skipped_steps"] for entry in steps} == {0.0}
