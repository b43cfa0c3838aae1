"""Confirmation of a prompt search: the best prompt replaces the first only with evidence from new rollouts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning_algorithms.shared.prompt_search.trial import LEVEL, confirm
from tests.algorithms.prompt_lab import SEED, TRAIN, VAL, Server, client, critic_and_editor
from tests.algorithms.test_gepa import make as make_gepa
from tests.algorithms.test_gepa import reflect


def publish_rate(rates: list[float], n_tasks: int, trials: int = 200) -> tuple[float, float]:
    """Searches among prompts with known success rates, with noisy scores.

    Returns:
        How often a prompt other than the first is published, and the mean gain that the search measured.
    """
    draw, published, gains = np.random.default_rng(17), 0, []

    async def score(prompt: Any, tasks: Any, number: int) -> list[float]:
        return [float(reward) for reward in draw.random(len(tasks)) < rates[prompt]]

    for _ in range(trials):
        scores = [draw.binomial(n_tasks, rate) / n_tasks for rate in rates]
        best: Any = int(np.argmax(scores))
        first: Any = 0
        found = asyncio.run(confirm(first, best, range(n_tasks), max(20, n_tasks), score))
        published += found.is_better and best != first
        gains.append(scores[best] - scores[first])
    return published / trials, float(np.mean(gains))


@pytest.mark.parametrize("n_tasks", [6, pytest.param(30, marks=pytest.mark.soak)])
def test_equal_prompts_replace_the_first_prompt_in_at_most_5_percent_of_the_runs(n_tasks: int) -> None:
    rate, gain = publish_rate([0.5] * 12, n_tasks)
    assert gain > 0.1, "the search measures a gain"
    assert rate <= LEVEL + 3 * (LEVEL * (1 - LEVEL) / 200) ** 0.5


def test_a_better_prompt_is_published() -> None:
    assert publish_rate([0.3, 0.3, 0.8], 30, trials=50)[0] >= 0.9


def run(algorithm: Any) -> tuple[Any, int]:
    """Trains an agent whose prompts are equally good, but the first prompt earns 0 in its first two validations.

    Returns:
        The last metrics and the number of rollouts.
    """
    lock, bad_luck = threading.Lock(), iter(range(2 * len(VAL)))

    def agent(task: Any, prompt: agl.PromptTemplate) -> float:
        if prompt.template == SEED and "val" in task["question"]:
            with lock:
                if next(bad_luck, None) is not None:
                    return 0.0
        return float(int(task["question"].split()[1]) % 2)

    store = agl.create_store("memory://")
    agl.Trainer(
        algorithm=algorithm, store=store, strategy="shm", tracer="dummy", trackers=[],
        initial_resources={"prompt": SEED},
    ).fit(agent, TRAIN, VAL)  # fmt: skip
    latest = asyncio.run(store.get_latest_resources())
    assert latest is not None
    assert latest.resources["prompt"] == algorithm.get_best_prompt()
    return asyncio.run(store.query_metrics()).items[-1].values, len(asyncio.run(store.query_rollouts(limit=1000)))


def test_apo_confirms_the_best_prompt_with_new_rollouts_and_keeps_the_first_of_equal_prompts() -> None:
    with Server(critic_and_editor) as server:
        models = {"gradient_model": "critic", "apply_edit_model": "editor"}
        trusting = agl.APO(client(server), **models, beam_rounds=1, confirm_pairs=0)
        run(trusting)
        assert trusting.get_best() is not trusting.history[0]
        careful = agl.APO(client(server), **models, beam_rounds=1)
        metrics, _ = run(careful)
    assert careful.get_best() is careful.history[0]
    assert careful.confirmation is not None
    assert careful.confirmation.first == careful.confirmation.best > 0.4
    assert (careful.confirmation.pairs, careful.confirmation.p_value) == (20, 0.5)
    assert careful.history[0].full_score == 0.0
    assert (metrics["best_score"], metrics["confirmed_best"]) == (0.5, careful.confirmation.best), (
        "the scores of search and confirmation are both reported"
    )


@pytest.mark.parametrize("max_rollouts", [30, 60, 115, 300])
def test_gepa_runs_at_most_max_rollouts_including_the_confirmation(max_rollouts: int) -> None:
    with Server(reflect) as server:
        gepa = make_gepa(server, max_rollouts=max_rollouts)
        _, n_rollouts = run(gepa)
    assert max_rollouts / 2 < n_rollouts <= max_rollouts


def test_too_few_rollouts_for_one_validation_and_its_confirmation_are_refused() -> None:
    with Server(reflect) as server, pytest.raises(agl.ConfigError, match="max_rollouts = 17: at least 18 are needed"):
        run(make_gepa(server, max_rollouts=17))
