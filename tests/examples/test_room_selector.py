"""examples/room_selector: APO finds the rules that the first prompt lacks."""

from __future__ import annotations

import re

import pytest
from examples.room_selector import room_selector, scripted


@pytest.mark.slow
def test_offline_apo_finds_all_rules_of_the_room_selector(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"):  # the example sets them until the test ends
        monkeypatch.setenv(name, "")
    assert room_selector.main(["--offline"]) == 0
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"reward: (\S+) with the first prompt, (\S+) with the best", said)[0])
    assert before <= 0.25
    assert after == 1.0
    assert said.split("best:\n\n")[1].startswith(room_selector.FIRST_PROMPT)
    assert all(rule in said for rule in (*scripted.RULES, scripted.SMALLEST))
