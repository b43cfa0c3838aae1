"""examples/live: one candidate is rejected, one promoted and one rolled back."""

from __future__ import annotations

import re

import pytest

from tests.source import REPO, run_python


@pytest.mark.soak
def test_the_live_example_rejects_promotes_and_rolls_back_candidates_without_manual_steps() -> None:
    said = run_python(str(REPO / "examples" / "live" / "live.py"), "--share", "0.3", "--users", "6")
    assert re.search(r"candidate 1 ran on (\d+) recorded tasks: \1 failed", said)
    assert re.search(r"candidate 2: \+\d.*; promoted as assistant@2", said)
    assert re.search(r"candidate 3: -\d.*; rolled back", said)
    assert said.count("gets 30% of the traffic") == 2
    assert "latest is assistant@2" in said
    assert "step by step" in said.split("latest is")[1]
    served = {version: int(count) for version, count in re.findall(r"  (\S+): served (\d+) times", said)}
    assert "default.candidate@1" not in served
    assert 0 < served["default.candidate@3"] < served["assistant@2"]
