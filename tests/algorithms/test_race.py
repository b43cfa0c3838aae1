"""Races of prompts, in the synthetic world of the benchmark."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from agentlightning_algorithms.shared.prompt_search.results import Gain
from tests.benchmarks.bench_prompts import FIRST, NOISES, World, make, run_ours


class Recording(World):
    """Notes each rollout and each request of a reflection."""

    def __init__(self, seed: int, noise: tuple[float, float]) -> None:
        super().__init__(seed, noise)
        self.ran: list[tuple[str, str]] = []
        self.asked: list[str] = []

    def rate(self, task: str, prompt: str) -> float:
        self.ran.append((prompt, task))
        return super().rate(task, prompt)

    def reflect(self, request: str) -> str:
        self.asked.append(request)
        return super().reflect(request)


def search(name: str, world: World, seed: int = 0, budget: int = 150, **settings: Any) -> Any:
    algorithm = make(name, budget)
    for setting, value in settings.items():
        setattr(algorithm, setting, value)
    run_ours(world, algorithm, seed)
    return algorithm


@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_few_rollouts_find_most_of_the_rules(name: str) -> None:
    """A search that runs every new prompt on all tasks reaches .14 with this budget, and the package ``gepa`` .31."""
    worlds = [World(seed, NOISES[0]) for seed in range(4)]
    found = [search(name, world, seed).get_best_prompt().template for seed, world in enumerate(worlds)]
    assert statistics.fmean(world.measure(prompt) for world, prompt in zip(worlds, found, strict=True)) > 0.4
    assert all(world.calls <= 150 for world in worlds)


@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_a_prompt_runs_on_a_task_once_and_lucky_results_stay_in_the_comparison(name: str) -> None:
    sizes: set[int] = set()
    for seed in range(3):
        world = Recording(seed, NOISES[1])
        found = search(name, world, budget=300, confirm_pairs=0)
        assert len(world.ran) == len(set(world.ran)) == found.n_rollouts > 250
        raced = {each.candidate_id: len(found.results.scores(each.candidate_id)) for each in found.history}
        sizes.update(raced.values())
        for each in found.history[1:]:
            assert raced[each.parent_id] >= raced[each.candidate_id], (
                "a child runs on no task of which its parent did not"
            )
    assert len(sizes - {0}) > 1, "races end after different numbers of tasks"


@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_a_reflection_reads_up_to_eight_failures_of_its_prompt(name: str) -> None:
    world = Recording(2, NOISES[1])
    search(name, world, budget=300)
    rollouts = [re.findall(r'reward="([\d.]+)"|reward ([\d.]+)', request) for request in world.asked]
    assert {len(shown) for shown in rollouts} <= set(range(4, 9))
    failures = [sum(float(one or other) < 1 for one, other in shown) for shown in rollouts]
    assert statistics.fmean(failures) > 4, "collected failures come first"


def test_a_prompt_that_solves_none_of_the_failures_is_not_validated() -> None:
    class Useless(Recording):
        def reflect(self, request: str) -> str:
            super().reflect(request)
            return f"{FIRST}\nRULE-{7 + len(self.asked) % 3}"  # harmful rules only

    world = Useless(3, NOISES[0])
    found = search("gepa", world)
    assert found.get_best() is found.history[0]
    assert not any(found.results.scores(each.candidate_id) for each in found.history[1:])
    assert all(found.results.of(each.candidate_id, "train") for each in found.history[1:])


def test_in_a_world_without_gain_most_strict_searches_keep_the_first_prompt_and_no_search_ends_worse() -> None:
    class Flat(World):
        def rate(self, task: str, prompt: str) -> float:
            return super().rate(task, FIRST)

    fair = [search("gepa", Flat(seed, NOISES[2]), seed).get_best_prompt().template != FIRST for seed in range(5)]
    strict = [
        search("gepa", Flat(seed, NOISES[2]), seed, confirm="strict").get_best_prompt().template != FIRST
        for seed in range(5)
    ]
    assert sum(strict) <= 1
    assert sum(fair) <= 4


def test_a_race_ends_when_the_child_cannot_win_or_is_clearly_better() -> None:
    found = search("apo", World(0, NOISES[0]))
    lost, won = found._has_lost, found._has_won
    assert lost(Gain(8, -0.2, 0.1, True))
    assert not lost(Gain(8, -0.01, 0.1, True)), "too little is known after the first tasks"
    assert lost(Gain(16, -0.01, 0.1, True))
    assert not lost(Gain(8, 0.0, 0.1, True))
    assert lost(Gain(found.count_raced(150), 0.05, 0.0, False)), "equal on all tasks"
    assert not won(Gain(8, 0.3, 0.1, True)), "too little is known after the first tasks"
    assert won(Gain(16, 0.3, 0.1, True))
    assert not won(Gain(16, 0.2, 0.1, True))
    assert not won(Gain(16, 0.1, 0.0, False)), "equal on all tasks"
