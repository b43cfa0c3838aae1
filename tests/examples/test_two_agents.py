"""examples/two_agents: both agents are trained, each with its own weights."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.algorithms.glossary import find_unexplained
from tests.algorithms.server_thread import threads_for_servers
from tests.source import REPO, run_python

EXAMPLE = REPO / "examples" / "two_agents" / "two_agents.py"


def read_rewards(said: str) -> tuple[float, ...]:
    """Returns the three rewards that the example prints."""
    found = re.search(r"reward (\S+) after training\n.* reward (\S+) before training, (\S+) after", said)
    assert found is not None
    return tuple(map(float, found.groups()))


@pytest.mark.soak
def test_both_agents_train_separate_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)  # as when Python runs the script
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setitem(main.__globals__, "WARM_UP_STEPS", 100)
    monkeypatch.setattr("sys.argv", ["two_agents.py", "--out", str(tmp_path / "out"), "--steps", "2"])
    with threads_for_servers():
        main()
    assert all(0.0 <= reward <= 1.0 for reward in read_rewards(capsys.readouterr().out))
    lines = (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if "translator/rows" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    for entry in steps:
        assert find_unexplained(entry, ["translator", "clerk"]) == {"step", "time"}
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
def test_a_translator_and_a_clerk_learn_to_cooperate(tmp_path: Path) -> None:
    trained, before, after = read_rewards(run_python(str(EXAMPLE), "--out", str(tmp_path / "out"), timeout_s=800))
    assert before <= 1 / 3
    assert trained >= 0.8, "if only one agent learned, at most a third of the orders would be filled"
    assert after >= before
