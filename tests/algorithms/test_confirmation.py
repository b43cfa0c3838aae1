"""Confirmation of a prompt search: the best prompt replaces the first only with evidence from new rollouts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning_algorithms.shared.prompt_search.trial import LEVEL, confirm
from tests.algorithms import test_apo, test_gepa
from tests.algorithms.prompt_lab import SEED, TRAIN, VAL, Server, client, critic_and_editor, worth
from tests.algorithms.test_gepa import make as make_gepa
from tests.algorithms.test_gepa import reflect


def search_often(
    rates: list[float], n_tasks: int, trials: int = 100, *, strict: bool = False
) -> tuple[float, float, float, float]:
    """Searches among prompts with known success rates, with noisy scores.

    Returns:
        How often a prompt other than the first is published; the mean gain that the search measured; and of the
        published prompts, the mean of the true gain and of the gain that the confirmation expects.
    """
    draw, gains, truths, expected = np.random.default_rng(17), [], [], []

    async def score(prompt: Any, tasks: Any, number: int) -> list[float]:
        return [float(reward) for reward in draw.random(len(tasks)) < rates[prompt]]

    for _ in range(trials):
        scores = [draw.binomial(n_tasks, rate) / n_tasks for rate in rates]
        best: Any = int(np.argmax(scores))
        first: Any = 0
        found = asyncio.run(confirm(first, best, range(n_tasks), max(20, n_tasks), score))
        if best != first and (found.is_confirmed if strict else found.is_better):
            truths.append(rates[best] - rates[first])
            expected.append(found.gain)
        gains.append(scores[best] - scores[first])
    return len(truths) / trials, float(np.mean(gains)), float(np.mean(truths)), float(np.mean(expected))


@pytest.mark.parametrize("n_tasks", [6, pytest.param(30, marks=pytest.mark.soak)])
def test_equal_prompts_replace_the_first_prompt_in_at_most_5_percent_of_the_strict_runs(n_tasks: int) -> None:
    rate, gain, *_ = search_often([0.5] * 12, n_tasks, 200, strict=True)
    assert gain > 0.1, "the search measures a gain"
    assert rate <= LEVEL + 3 * (LEVEL * (1 - LEVEL) / 200) ** 0.5


def test_a_better_prompt_is_published() -> None:
    assert search_often([0.3, 0.3, 0.8], 30, trials=50, strict=True)[0] >= 0.9


def test_a_fair_confirmation_publishes_a_small_gain_that_a_strict_one_throws_away() -> None:
    rates = [0.4] * 6 + [0.48] * 6
    fair, _, gain, expected = search_often(rates, 60)
    strict = search_often(rates, 60, strict=True)[0]
    assert fair > 0.6 > 0.3 > strict
    assert gain > 0.04
    assert abs(expected - gain) < 0.04, "the expected gain is shrunken: the measured one is too high by more"


def test_without_a_gain_a_fair_confirmation_changes_half_of_the_prompts_and_makes_none_much_worse() -> None:
    rate, *_ = search_often([0.5] * 12, 60)
    assert 0.35 < rate < 0.6
    rate, _, gain, _ = search_often([0.5] + [0.4] * 11, 60)
    assert rate < 0.25
    assert rate * gain > -0.02, "the mean loss of a search whose candidates are all worse"


def run(algorithm: Any) -> tuple[Any, int]:
    """Trains an agent whose prompts are equally good; the first earns 0 in training and in its first validation.

    Returns:
        The last metrics and the number of rollouts.
    """
    lock, bad_luck = threading.Lock(), iter(range(len(VAL)))

    def agent(task: Any, prompt: agl.PromptTemplate) -> float:
        if prompt.template == SEED:
            with lock:
                if "train" in task["question"] or next(bad_luck, None) is not None:
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
        careful = agl.APO(client(server), **models, beam_rounds=1, confirm="strict")
        metrics, _ = run(careful)
        fair = agl.APO(client(server), **models, beam_rounds=1)
        found, _ = run(fair)
    assert careful.get_best() is careful.history[0]
    assert careful.confirmation is not None
    assert careful.confirmation.first == careful.confirmation.best > 0.4
    assert (careful.confirmation.pairs, careful.confirmation.p_value) == (20, 0.5)
    assert not careful.confirmation.is_confirmed
    assert careful.history[0].full_score == 0.0
    assert fair.confirmation is not None
    assert fair.confirmation.first < fair.confirmation.best, "the earlier rollouts of the first prompt count"
    assert fair.get_best() is not fair.history[0]
    assert found["confirmed_gain_low"] < found["confirmed_gain"] < found["confirmed_gain_high"]
    assert (metrics["best_score"], metrics["confirmed_best"]) == (0.5, careful.confirmation.best), (
        "the scores of search and confirmation are both reported"
    )


@pytest.mark.parametrize("max_rollouts", [30, 60, 115, 300])
def test_gepa_runs_at_most_max_rollouts_including_the_confirmation(max_rollouts: int) -> None:
    with Server(reflect) as server:
        gepa = make_gepa(server, max_rollouts=max_rollouts)
        _, n_rollouts = run(gepa)
    assert n_rollouts <= max_rollouts
    assert n_rollouts > max_rollouts / 2 or gepa.stopped_because == "no_new_prompt"


def test_too_few_rollouts_for_one_validation_and_its_confirmation_are_refused() -> None:
    with Server(reflect) as server:
        with pytest.raises(agl.ConfigError, match="max_rollouts = 29: at least 30 are needed to try one new prompt"):
            run(make_gepa(server, max_rollouts=29))
        gepa = make_gepa(server, max_rollouts=30)
        _, n_rollouts = run(gepa)
        assert n_rollouts <= 30
        assert len(gepa.history) > 1


@pytest.mark.parametrize("confirm", ["fair", "strict"])
def test_apo_runs_at_most_max_rollouts_and_refuses_a_number_that_is_too_small_for_a_round(confirm: Any) -> None:
    settings = {"gradient_model": "critic", "apply_edit_model": "editor", "confirm": confirm}
    with Server(critic_and_editor) as server:
        for max_rollouts in (90, 150):
            apo = agl.APO(client(server), **settings, max_rollouts=max_rollouts, perfect_score=None)
            _, n_rollouts = run(apo)
            assert apo.n_rollouts == n_rollouts <= max_rollouts
            assert apo.stopped_because in ("rollouts", "no_new_prompt")
            assert len(apo.history) > 1
        with pytest.raises(agl.ConfigError, match=r"max_rollouts = 20: at least \d+ are needed") as raised:
            run(agl.APO(client(server), **settings, max_rollouts=20))
        least = int(str(raised.value).split("at least ")[1].split()[0])
        apo = agl.APO(client(server), **settings, max_rollouts=least)
        run(apo)
        assert len(apo.history) > 1
        with pytest.raises(agl.ConfigError, match=f"max_rollouts = {least - 1}"):
            run(agl.APO(client(server), **settings, max_rollouts=least - 1))


@pytest.mark.parametrize("name", ["apo", "gepa"])
def test_a_prompt_that_solves_every_task_ends_the_search(name: str) -> None:
    lab = test_apo if name == "apo" else test_gepa
    with Server(critic_and_editor if name == "apo" else reflect) as server:
        search: Any = lab.make(server, max_rollouts=700)
        lab.train(search)
    assert search.stopped_because == "perfect_score"
    assert search.n_rollouts < 500
    assert search.get_best().full_score == 1.0


def test_where_higher_rewards_occur_a_reward_of_1_is_not_perfect() -> None:
    def agent(task: Any, prompt: agl.PromptTemplate) -> float:
        return worth(prompt.template) if "val" in task["question"] else 3.0

    with Server(critic_and_editor) as server:
        apo = test_apo.make(server, beam_rounds=6)
        test_apo.train(apo, agent)
    assert apo.get_best().full_score == 1.0
    assert apo.stopped_because == "rounds"
