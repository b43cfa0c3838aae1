"""The difference between two sets of rewards: estimate, interval, p-value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentlightning.errors import NotFoundError
from agentlightning_plugins.shared.statistics.interval import (
    Interval,
    paired_interval,
    t_p_value,
    t_quantile,
    unpaired_interval,
    variance,
)
from agentlightning_plugins.shared.statistics.score import Score
from agentlightning_plugins.shared.statistics.significance import paired_p_value, reconcile, unpaired_p_value


@dataclass(frozen=True)
class Difference:
    """A difference of mean rewards. p-value and interval agree: p is at most .05 if the interval excludes 0."""

    mean: float
    low: float
    """Lower end of the 95 % interval; -inf if the rewards allow no estimate."""
    high: float
    p_value: float
    """Two-sided p-value of no difference."""


def paired_difference(differences: Sequence[float]) -> Difference:
    """Estimates the mean of the differences, one per task; at least one is needed."""
    p_value = paired_p_value(differences)
    return _make(statistics.fmean(differences), paired_interval(differences), p_value)


def unpaired_difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Estimates the mean of ``one`` minus the mean of ``other``; the values are independent."""
    p_value = unpaired_p_value(one, other)
    return _make(statistics.fmean(one) - statistics.fmean(other), unpaired_interval(one, other), p_value)


def difference_over_seeds(one: Sequence[Mapping[int, float]], other: Sequence[Mapping[int, float]]) -> Difference:
    """Compares two algorithms that were trained once for each seed and evaluated on the same tasks.

    Tasks are a sample, and so are seeds if there are two or more. The variance is the sum of the variance over tasks
    and the variances over the seeds of each algorithm, with Student's t and the degrees of freedom of Welch and
    Satterthwaite (Satterthwaite 1946, Biometrics Bulletin 2). The result has the larger p-value and the wider interval
    of this method and of the comparison over tasks only.

    Args:
        one: mean reward of each task, by seed; tasks without a reward for every seed are excluded.
        other: the same for the other algorithm.

    Raises:
        NotFoundError: no task has a reward for every seed of both algorithms.
    """
    tasks = sorted(set.intersection(*({*seed} for seed in (*one, *other))))
    if not tasks:
        raise NotFoundError("the algorithms have no test task with a reward in common")
    by_task = [[statistics.fmean(seed[task] for seed in seeds) for task in tasks] for seeds in (one, other)]
    differences = [mine - theirs for mine, theirs in zip(*by_task, strict=True)]
    found = paired_difference(differences)
    parts = [(variance(differences) / len(tasks), len(tasks) - 1)]
    for seeds in (one, other):
        means = [statistics.fmean(seed[task] for task in tasks) for seed in seeds]
        parts.append((variance(means) / len(means), len(means) - 1))
    total = sum(part for part, _ in parts)
    if min(len(one), len(other)) < 2 or len(tasks) < 2 or total <= 0:
        return found
    freedom = _satterthwaite(parts)
    half, p_value = t_quantile(freedom) * math.sqrt(total), t_p_value(found.mean / math.sqrt(total), freedom)
    widest = min(found.low, found.mean - half), max(found.high, found.mean + half)
    return _make(found.mean, widest, max(p_value, found.p_value))


def interval_over_seeds(score: Score, seeds: Sequence[Mapping[int, float]]) -> Interval | None:
    """Interval of the mean reward of an algorithm that was trained once for each seed.

    Tasks are a sample, and so are seeds if there are two or more, as in ``difference_over_seeds``. The result is the
    wider of this interval and the interval over tasks only.

    Args:
        score: the score of all seeds together.
        seeds: mean reward of each task, by seed.
    """
    found, means = score.interval(), [mean for mean in score.by_task() if mean is not None]
    tasks = set.intersection(*({*seed} for seed in seeds))
    if found is None or len(seeds) < 2 or not tasks:
        return found
    trained = [statistics.fmean(seed[task] for task in tasks) for seed in seeds]
    parts = [(variance(means) / len(means), len(means) - 1), (variance(trained) / len(trained), len(trained) - 1)]
    total = sum(part for part, _ in parts)
    if total <= 0:
        return found
    half = t_quantile(_satterthwaite(parts)) * math.sqrt(total)
    low, high = min(found[0], score.mean - half), max(found[1], score.mean + half)
    is_rate = {reward for task in score.rewards for reward in task} <= {0, 1}
    return (max(low, 0.0), min(high, 1.0)) if is_rate else (low, high)


def _satterthwaite(parts: Sequence[tuple[float, int]]) -> float:
    """Degrees of freedom of a sum of variances, each with its own degrees of freedom."""
    return sum(part for part, _ in parts) ** 2 / sum(part**2 / count for part, count in parts)


def _make(mean: float, interval: Interval | None, p_value: float) -> Difference:
    low, high = (-math.inf, math.inf) if interval is None else reconcile(interval, p_value, mean)
    return Difference(mean, low, high, p_value)
