"""The size of a comparison that finds a difference of a given size."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning_plugins.statistics.interval import variance
from agentlightning_plugins.statistics.score import Score

POWER: Final = 0.8
"""Probability of finding the difference, at a level of 5 %."""
_REPETITIONS: Final = (1, 2, 4, 8, 16)
_LEAST_TASKS: Final = 6
"""With fewer, no permutation of the signs is significant at 5 %."""


@dataclass(frozen=True)
class Plan:
    """Numbers of tasks that find a difference, with so many repetitions of each in both evaluations."""

    repetitions: int
    same_tasks: int
    """If both evaluations run the same tasks."""
    other_tasks: int
    """For each evaluation, if they run different tasks."""


def plan(score: Score, difference: float) -> list[Plan]:
    """Plans a comparison with an agent that is better by ``difference``, equally so on every task.

    The sample size of a two-sided test of means (Cohen 1988, Statistical Power Analysis, section 2.4), with the
    variances between tasks and within them of a score (one-way random effects; Searle, Casella and McCulloch 1992,
    section 3.6). A score with one repetition does not tell them apart: all variance then counts as within tasks, the
    worst case for the same tasks.

    Raises:
        ConfigError: the difference is not above 0, or fewer than two tasks have a reward.
    """
    rated = [task for task in score.rewards if task]
    if not difference > 0 or len(rated) < 2:
        raise ConfigError(
            f"a plan for a difference of {difference} needs a difference above 0 and two tasks with rewards"
        )
    means = [statistics.fmean(task) for task in rated]
    repeated = [task for task in rated if len(task) > 1]
    total = variance(means)
    within = total if not repeated else statistics.fmean(variance(task) for task in repeated)
    between = max(total - statistics.fmean(within / len(task) for task in rated), 0.0)
    normal = statistics.NormalDist()
    quantiles = normal.inv_cdf(0.975) + normal.inv_cdf(POWER)

    def tasks(spread: float) -> int:
        needed = 2 * spread * (quantiles / difference) ** 2
        # 2 for Student's t in place of the normal quantile; a tenth for ties, which permutation tests count against it.
        return max(math.ceil(1.1 * needed) + 2, _LEAST_TASKS)

    return [Plan(n, tasks(within / n), tasks(between + within / n)) for n in _REPETITIONS]
