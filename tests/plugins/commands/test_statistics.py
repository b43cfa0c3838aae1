"""Intervals and p-values: against SciPy 1.17.1, whose results are written out, and by simulation with fixed seeds.

The simulations state the promised level and allow three standard errors. They use fewer resamples than the commands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.errors import NotFoundError
from agentlightning_plugins.shared.statistics import interval
from agentlightning_plugins.shared.statistics.comparison import (
    Group,
    compare_groups,
    difference_over_seeds,
    interval_over_seeds,
    paired_difference,
    unpaired_difference,
)
from agentlightning_plugins.shared.statistics.interval import (
    adjust_p_values,
    mean_interval,
    paired_interval,
    paired_p_value,
    t_p_value,
    unpaired_interval,
    unpaired_p_value,
    wilson,
)
from agentlightning_plugins.shared.statistics.score import Score, plan

LEVEL = 0.05


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "_RESAMPLES", 200)


def limit(trials: int, level: float = LEVEL) -> float:
    return level + 3 * math.sqrt(level * (1 - level) / trials)


# --- the same numbers as SciPy ---


def test_the_p_value_of_few_values_equals_that_of_all_permutations() -> None:
    assert paired_p_value([0.3, -0.1, 0.4, 0.25, -0.05, 0.6, 0.1, 0.2]) == pytest.approx(0.046875)
    one, other = [0.1, 0.9, 0.4, 0.7], [0.5, 0.55, 0.45, 0.6, 0.52, 0.48]
    assert unpaired_p_value(one, other) == pytest.approx(0.96666667)


def test_the_p_value_of_many_values_agrees_with_200_000_permutations() -> None:
    one, other = [n % 10 / 10 for n in range(30)], [n * n % 7 / 7 + 0.12 for n in range(40)]
    assert unpaired_p_value(one, other) == pytest.approx(0.4432, abs=0.03)
    assert paired_p_value([n * 7 % 11 / 11 - 0.35 for n in range(30)]) == pytest.approx(0.0498, abs=0.012)


def test_intervals_and_students_t_agree_with_scipy() -> None:
    assert wilson(1.0, 5) == pytest.approx((0.56551754, 1.0))
    assert wilson(0.95, 20) == pytest.approx((0.76386881, 0.99111855))
    for t, freedom, expected in ((2.0, 3.7, 0.12181720), (4.58, 7, 0.00254376), (12.706, 1, 0.05000080)):
        assert t_p_value(t, freedom) == pytest.approx(expected, abs=1e-6)
    found = mean_interval([n * 7 % 11 / 11 for n in range(20)])
    assert found == pytest.approx((0.3053, 0.5898), abs=0.015)  # 200,000 resamples of the bootstrap-t in NumPy


# --- levels ---


@pytest.mark.parametrize(("n_one", "n_other"), [(10, 40), (20, 20)])
def test_the_unpaired_test_keeps_its_level_with_unequal_variances(
    few_resamples: None, n_one: int, n_other: int
) -> None:
    """Without studentizing, 39 to 50 % of comparisons were significant where the smaller group varies more."""
    draw, trials = np.random.default_rng(17), 150
    hits = 0
    for _ in range(trials):
        one, other = draw.normal(0.5, 0.02, n_one), draw.normal(0.5, 0.4, n_other)
        hits += unpaired_p_value(one.tolist(), other.tolist()) <= LEVEL
    assert hits / trials <= limit(trials, 0.06)


@pytest.mark.parametrize(("n", "level"), [(5, 0.16), (10, 0.11), (30, 0.07)])
def test_skewed_scores_on_one_side_make_the_unpaired_p_value_too_small_for_few_tasks(
    few_resamples: None, n: int, level: float
) -> None:
    """The intervals of the same samples, before they are made to agree with p, exclude 0 in 5 %."""
    draw, trials = np.random.default_rng(17), 150
    hits = 0
    for _ in range(trials):
        hits += unpaired_p_value(draw.beta(9, 1, n).tolist(), draw.normal(0.9, 0.001, n).tolist()) <= LEVEL
    assert hits / trials <= limit(trials, level)


@pytest.mark.parametrize("rate", [0.95, 0.5])
def test_intervals_of_successes_contain_the_rate_as_often_as_the_documentation_says(rate: float) -> None:
    row = f"successes of {rate:g}".replace("0.", ".")
    found = []
    for n in (5, 10, 30, 100):
        covered = 0.0
        for successes in range(n + 1):
            low, high = wilson(successes / n, n)
            if low <= rate <= high:
                covered += math.comb(n, successes) * rate**successes * (1 - rate) ** (n - successes)
        found.append(f"{covered:.3f}".removeprefix("0"))
    page = (Path(__file__).parents[3] / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert f"| {row} | {' | '.join(found)} |" in page


def test_users_are_compared_and_not_their_rollouts(few_resamples: None) -> None:
    """With 100 users that rate 20 times each, 33 % of comparisons by rollout were significant."""
    draw, trials = np.random.default_rng(17), 40
    hits = 0
    for _ in range(trials):
        levels = draw.beta(0.8, 0.6, 100)
        users = [draw.binomial(1, level, 20).astype(float).tolist() for level in levels]
        groups = [Group("g", {f"user {n}": users[n] for n in range(start, 100, 2)}, has_users=True) for start in (0, 1)]
        hits += compare_groups(*groups).p_value <= LEVEL
    assert hits / trials <= limit(trials)


def coverage(draw_values: Callable[[Any, int], Any], mean: float, n: int, trials: int = 150) -> float:
    draw = np.random.default_rng(17)
    found = [mean_interval(draw_values(draw, n).tolist()) for _ in range(trials)]
    return sum(each is not None and each[0] <= mean <= each[1] for each in found) / trials


SAMPLES: dict[str, tuple[Callable[[Any, int], Any], float]] = {
    "successes of .95": (lambda draw, n: (draw.random(n) < 0.95) * 1.0, 0.95),
    "successes of .5": (lambda draw, n: (draw.random(n) < 0.5) * 1.0, 0.5),
    "rates of 3 repetitions near .9": (lambda draw, n: draw.binomial(3, draw.beta(9, 1, n)) / 3, 0.9),
    "rewards of 0, .5 and 1 near .9": (lambda draw, n: draw.choice([0, 0.5, 1], n, p=[0.05, 0.1, 0.85]), 0.9),
    "scores near .9": (lambda draw, n: draw.beta(8, 0.8, n), 8 / 8.8),
    "scores around .5": (lambda draw, n: draw.random(n), 0.5),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_intervals_of_few_tasks_contain_the_mean(
    few_resamples: None, sample: tuple[Callable[[Any, int], Any], float]
) -> None:
    """Promised: 95 %, and at least 90 % for skewed scores. Percentile intervals reached 24 to 80 % near 1."""
    for n in (5, 10):
        assert coverage(*sample, n) >= 0.90 - 3 * math.sqrt(0.9 * 0.1 / 150)


@pytest.mark.soak
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
@pytest.mark.parametrize("n", [5, 10, 30, 100])
def test_intervals_contain_the_mean_at_every_size(
    few_resamples: None, sample: tuple[Callable[[Any, int], Any], float], n: int
) -> None:
    assert coverage(*sample, n, trials=1000) >= 0.90


@pytest.mark.parametrize(
    ("rates", "mean", "least"),
    [
        (lambda draw, n: draw.random(n), 0.5, {5: 0.95, 10: 0.95, 30: 0.94}),
        (lambda draw, n: 0.95 * (draw.random(n) < 0.9), 0.855, {5: 0.87, 10: 0.66, 30: 0.94}),
    ],
    ids=["rates between 0 and 1", "one task in ten is impossible"],
)
def test_the_interval_of_a_score_with_16_repetitions_of_few_tasks_contains_the_mean(
    rates: Callable[[Any, int], Any], mean: float, least: dict[int, float]
) -> None:
    """Without the degrees of freedom, .88 and .60 for 5 tasks. An impossible task is often not among 10."""
    for n, share in least.items():
        draw, trials, hits = np.random.default_rng(17), 1000, 0
        for _ in range(trials):
            rewards = (draw.random((n, 16)) < rates(draw, n)[:, None]) * 1.0
            low, high = Score(rewards.tolist()).interval() or (math.nan, math.nan)
            hits += low <= mean <= high
        assert hits / trials >= share - 3 * math.sqrt(share * (1 - share) / trials)


@pytest.mark.parametrize("kind", ["paired", "unpaired", "success", "paired success"])
def test_the_interval_of_a_difference_agrees_with_its_p_value_and_contains_the_difference(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(interval, "_RESAMPLES", 400)  # with fewer, the interval covers less
    draw, covered, trials = np.random.default_rng(17), 0, 100
    for _ in range(trials):
        if "success" in kind:
            one, other = (draw.random(14) < 0.9) * 1.0, (draw.random(14) < 0.5) * 1.0
        else:
            one, other = draw.beta(4, 2, 14) + 0.1, draw.beta(4, 2, 14)
        found = (
            paired_difference((one - other).tolist())
            if "paired" in kind.split()
            else unpaired_difference(one.tolist(), other.tolist())
        )
        covered += found.low <= (0.4 if "success" in kind else 0.1) <= found.high
        if found.p_value > LEVEL:
            assert found.low <= 0.0 <= found.high
        else:
            assert found.low >= 0.0 or found.high <= 0.0
    assert covered / trials >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / trials)


def test_a_significant_difference_lies_in_its_interval() -> None:
    """With these skewed differences, the middle of the interval is below 0 and the mean above."""
    found = paired_difference([0.48 + 0.005 * n for n in range(13)] + [-1.0])
    assert found.p_value <= LEVEL
    assert found.low == 0.0 < found.mean <= found.high


def test_a_comparison_over_seeds_treats_the_seeds_as_a_sample(few_resamples: None) -> None:
    """Trainings differ by .1; when their means were treated as exact, most comparisons were significant."""
    draw, trials, hits = np.random.default_rng(17), 100, 0
    for _ in range(trials):
        tasks = draw.beta(4, 2, 20)
        trained = [
            [dict(enumerate((tasks + draw.normal(0, 0.1) + draw.normal(0, 0.05, 20)).tolist())) for _ in range(3)]
            for _ in range(2)
        ]
        hits += difference_over_seeds(*trained).p_value <= LEVEL
    assert hits / trials <= limit(trials)


@pytest.mark.parametrize(("deviation", "is_success"), [(0.0, True), (0.1, True), (0.1, False)])
def test_the_interval_of_an_algorithm_contains_the_mean_over_seeds(
    few_resamples: None, deviation: float, is_success: bool
) -> None:
    """Promised: 90 %, for 3 trainings and 50 tasks. Over tasks alone, 51 to 77 % if trainings differ by .1."""
    draw, trials, hits = np.random.default_rng(17), 150, 0
    for _ in range(trials):
        ease, rewards = draw.normal(0.0, 0.15, 50), []
        for _ in range(3):
            rates = np.clip(0.6 + draw.normal(0, deviation) + ease, 0, 1)
            rewards.append((draw.random(50) < rates) * 1.0 if is_success else rates + draw.normal(0, 0.1, 50))
        pooled = Score(np.stack(rewards, axis=1).tolist())
        low, high = interval_over_seeds(pooled, [dict(enumerate(each.tolist())) for each in rewards]) or (1.0, 0.0)
        hits += low <= 0.6 <= high
    assert hits / trials >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / trials)


def test_the_interval_over_tasks_is_used_if_seeds_share_no_task_or_all_agree() -> None:
    score = Score([[1.0], [0.0], [1.0]])
    assert interval_over_seeds(score, [{0: 1.0, 1: 0.0}, {2: 1.0}]) == score.interval()
    assert interval_over_seeds(Score([[1.0, 0.0]]), [{0: 1.0}, {0: 0.0}]) is None
    alike = Score([[1.0, 1.0]] * 5)
    assert interval_over_seeds(alike, [dict.fromkeys(range(5), 1.0)] * 2) == alike.interval()
    low, high = interval_over_seeds(Score([[1.0, 0.0]] * 5), [dict.fromkeys(range(5), n) for n in (1.0, 0.0)]) or (1, 0)
    assert (low, high) == (0.0, 1.0)


def test_algorithms_without_a_common_task_cannot_be_compared() -> None:
    with pytest.raises(NotFoundError, match="no test task with a reward in common"):
        difference_over_seeds([{0: 1.0}], [{1: 1.0}])


def test_a_planned_comparison_detects_the_difference_with_the_promised_power(few_resamples: None) -> None:
    """Promised: a power of 80 %, from an evaluation of 60 tasks with 4 repetitions."""
    draw = np.random.default_rng(17)

    def evaluate(rates: Any, repetitions: int) -> Any:
        return (draw.random((len(rates), repetitions)) < rates[:, None]) * 1.0

    size = plan(Score(evaluate(draw.uniform(0.1, 0.9, 60), 4).tolist()), 0.2)[1]
    trials, hits = 60, [0, 0]
    for _ in range(trials):
        rates, same, other = (draw.uniform(0, 0.8, n) for n in (size.other_tasks, size.same_tasks, size.other_tasks))
        better = [evaluate(chances + 0.2, size.repetitions).mean(1) for chances in (same, other)]
        worse = [evaluate(chances, size.repetitions).mean(1) for chances in (same, rates)]
        hits[0] += paired_p_value((better[0] - worse[0]).tolist()) <= LEVEL
        hits[1] += unpaired_p_value(better[1].tolist(), worse[1].tolist()) <= LEVEL
    assert all(abs(count / trials - 0.8) <= 3 * math.sqrt(0.8 * 0.2 / trials) for count in hits)
    with pytest.raises(agl.ConfigError, match="two tasks with rewards"):
        plan(Score([[1.0, 0.0]]), 0.1)


# --- edges ---


def test_five_successes_do_not_prove_that_every_task_succeeds() -> None:
    assert Score([[1.0]] * 5).interval() == pytest.approx((0.5655, 1.0), abs=1e-4)
    found = Score([[1.0, 1.0]] * 5).interval()
    assert found == pytest.approx((0.5655, 1.0), abs=1e-4), "repetitions of the same tasks add no tasks"
    varied = Score([[1.0, 0.0], [0.0, 1.0]] * 10).interval()
    assert varied is not None
    assert varied[1] - varied[0] < 0.32, "all variance is within tasks, so the rollouts count"


def test_one_task_or_equal_values_outside_0_to_1_have_no_interval() -> None:
    assert mean_interval([0.7]) is None
    assert mean_interval([7.0] * 5) is None
    assert paired_interval([3.0, 3.0]) is None
    assert unpaired_interval([1.0], [0.0, 1.0]) is None
    assert "reward_low" not in Score([[1.0, 0.0]]).to_metrics()
    assert unpaired_difference([7.0] * 5, [5.0] * 5).low == -math.inf


def test_no_result_depends_on_the_order_of_the_rows() -> None:
    draw = random.Random(17)
    one, other = [draw.gauss(0.6, 0.2) for _ in range(30)], [draw.gauss(0.5, 0.2) for _ in range(25)]
    shuffled, other_shuffled = draw.sample(one, 30), draw.sample(other, 25)
    assert unpaired_p_value(one, other) == unpaired_p_value(shuffled, other_shuffled)
    assert paired_p_value(one) == paired_p_value(shuffled)
    assert mean_interval(one) == pytest.approx(mean_interval(shuffled))
    assert unpaired_interval(one, other) == pytest.approx(unpaired_interval(shuffled, other_shuffled))


def group(rewards: Sequence[float | None], offset: float = 0.0) -> Group:
    known = {f"task {n}": [reward + offset] for n, reward in enumerate(rewards) if reward is not None}
    return Group("g", known)


def test_a_task_without_a_reward_is_dropped_and_the_other_tasks_stay_paired() -> None:
    levels = [n / 40 for n in range(40)]
    whole = compare_groups(group(levels), group([level + 0.01 * (n % 3) for n, level in enumerate(levels)]))
    part = compare_groups(group(levels), group([None, *(lev + 0.01 * (n % 3) for n, lev in enumerate(levels[1:], 1))]))
    assert (whole.paired, whole.dropped) == (True, 0)
    assert (part.paired, part.dropped, part.control.n, part.treatment.n) == (True, 1, 39, 39)
    assert part.p_value < 0.001
    assert part.difference == pytest.approx(part.treatment.mean - part.control.mean)
    apart = compare_groups(group(levels), Group("g", {f"task {n + 30}": [level] for n, level in enumerate(levels)}))
    assert not apart.paired, "most tasks are not common"


def test_several_comparisons_are_adjusted_by_holm() -> None:
    assert adjust_p_values([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_p_values([]) == []
    assert adjust_p_values([0.9, 0.8]) == [1.0, 1.0]


def test_an_empty_score_and_an_impossible_k_are_refused() -> None:
    with pytest.raises(agl.NotFoundError, match="none of 2 tasks has a reward"):
        _ = Score([[], []]).mean
    score = Score([[1.0, 0.0], [1.0]], missing=1)
    assert score.pass_at(2) == 1.0
    for k in (0, 3):
        with pytest.raises(agl.ConfigError, match=f"pass@{k} needs a k from 1 to 2"):
            score.pass_at(k)
    assert score.to_metrics()["missing"] == 1.0


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_number_of_tasks_for_a_gate_is_the_first_whose_interval_passes_it(confidence: float) -> None:
    six = Score([[1.0]] * 5 + [[0.0]])
    low, _ = six.interval(confidence) or (math.nan, math.nan)
    assert low < 0.8 < six.mean
    needed = six.tasks_for(0.8, confidence)
    assert needed is not None
    assert wilson(six.mean, needed, confidence)[0] >= 0.8 > wilson(six.mean, needed - 1, confidence)[0]
    assert six.tasks_for(0.9, confidence) is None
    scores = Score([[0.9 + 0.02 * (n % 5)] for n in range(10)])
    assert (scores.tasks_for(0.9, confidence) or 0) <= 10
    assert (scores.interval(confidence) or (0, 0))[0] > 0.9


def test_intervals_of_every_confidence_cover_the_mean_as_often_as_they_promise(few_resamples: None) -> None:
    draw = np.random.default_rng(0)
    for confidence in (0.8, 0.95, 0.99):
        found = [mean_interval(draw.normal(0.5, 0.1, 30).tolist(), confidence) for _ in range(60)]
        assert abs(np.mean([each is not None and each[0] < 0.5 < each[1] for each in found]) - confidence) < 0.12
