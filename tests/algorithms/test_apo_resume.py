"""A search that is killed repeatedly ends like an undisturbed one and repeats no recorded call."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.apo_program import search
from tests.algorithms.killed_process import end_leases
from tests.algorithms.prompt_lab import Server, critic_and_editor, phrases
from tests.source import REPO
from tests.waiting import blocking_until

Found: TypeAlias = tuple[str, list[list[Any]]]
CALLS = 48
"""Number of model calls of an undisturbed search: 3 rounds of 8 critiques and 8 edits."""


class CallCounter:
    """Numbers every call, so that the cache shows which calls it has recorded."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        """Hash of each request, in the order of calls."""

    def __call__(self, request: RecordedRequest) -> Answer:
        messages = json.dumps(request.body["messages"])
        asked = re.sub(r"\[call \d+\]", "", messages)  # a critique contains the number of its call
        self.questions.append(request.body["model"] + hashlib.blake2b(asked.encode(), digest_size=8).hexdigest())
        answer = critic_and_editor(request)
        return Answer(f"{answer.content} [call {len(self.questions) - 1}]", delay_s=0.03)

    def recorded(self, directory: Path) -> set[int]:
        """Returns the numbers of the calls in the cache."""
        file = directory / "llm_calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [re.search(r"\[call (\d+)\]", line) for line in lines]
        return {int(match[1]) for match in found if match is not None}


def kill_at(point: int, delay_s: float, directory: Path, endpoint: str, counter: CallCounter) -> set[int]:
    """Kills the program ``delay_s`` after call number ``point``; returns the calls recorded by then."""
    program = [sys.executable, "-m", "tests.algorithms.apo_program", str(directory), endpoint]
    with subprocess.Popen(program, cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}) as process:
        try:
            blocking_until(lambda: len(counter.questions) >= point or process.poll() is not None)
            time.sleep(delay_s)
        finally:
            process.send_signal(signal.SIGKILL)
    asyncio.run(end_leases(directory.parent / "store.db"))
    return counter.recorded(directory)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    counter = CallCounter()
    with Server(counter) as server:
        found = search(tmp_path_factory.mktemp("whole") / "run", server.endpoint)
    assert len(counter.questions) == CALLS
    assert len(phrases(found[0])) >= 2, "three rounds find most rules"
    return found


def check(undisturbed: Found, directory: Path, points: list[tuple[int, float]]) -> None:
    counter = CallCounter()
    recorded: set[int] = set()
    with Server(counter) as server:
        starts: list[tuple[int | None, float]] = [*points, (None, 0.0)]
        for point, delay_s in starts:
            paid = {counter.questions[number] for number in recorded}
            known = len(counter.questions)
            if point is None:
                assert search(directory, server.endpoint) == undisturbed
            else:
                recorded = kill_at(point, delay_s, directory, server.endpoint, counter)
            assert paid.isdisjoint(counter.questions[known:]), "a recorded call was made again"
    assert len(counter.recorded(directory)) == CALLS


@pytest.mark.slow
def test_a_search_killed_three_times_finds_the_same_prompt_and_repeats_no_recorded_call(
    undisturbed: Found, tmp_path: Path
) -> None:
    draw = random.Random(7)
    points = sorted((draw.randrange(1, CALLS), draw.random() * 0.3) for _ in range(3))
    check(undisturbed, tmp_path / "run", points)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_a_search_killed_at_a_random_point_finds_the_same_prompt(undisturbed: Found, tmp_path: Path, seed: int) -> None:
    draw = random.Random(f"soak {seed}")
    check(undisturbed, tmp_path / "run", [(draw.randrange(1, CALLS), draw.random() * 0.3)])
