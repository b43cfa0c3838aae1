"""examples/room_selector: APO finds the rules that the first prompt lacks."""

from __future__ import annotations

import re

from examples.room_selector import room_selector, scripted

from tests.source import REPO, run_python


def test_offline_apo_finds_all_rules_of_the_room_selector() -> None:
    said = run_python("-m", "examples.room_selector.room_selector", "--offline", cwd=REPO, timeout_s=250)
    before, after = map(float, re.findall(r"reward: (\S+) with the first prompt, (\S+) with the best", said)[0])
    assert before <= 0.25
    assert after == 1.0
    assert said.split("best:\n\n")[1].startswith(room_selector.FIRST_PROMPT)
    assert all(rule in said for rule in (*scripted.RULES, scripted.SMALLEST))
