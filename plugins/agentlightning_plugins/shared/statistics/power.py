"""Number of tasks that a comparison needs to detect a difference of a given size."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning_plugins.shared.statistics.interval import variance
from agentlightning_plugins.shared.statistics.score import Score

POWER: Final = 0.8
"""Probability of detecting the difference, at a significance level of 5 %."""
_REPETITIONS: Final = (1, 2, 4, 8, 16)
_LEAST_TASKS: Final = 6
"""With fewer tasks, no permutation of the signs is significant at 5 %."""


@dataclass(frozen=True)
class SampleSizePlan:
    """Numbers of tasks that detect a difference, if both evaluations run each task ``repetitions`` times."""

    repetitions: int
    same_tasks: int
    """Number of tasks if both evaluations run the same tasks."""
    other_tasks: int
    """Number of tasks of each evaluation if the evaluations run different tasks."""


def plan(score: Score, difference: float) -> list[SampleSizePlan]:
    """Plans a comparison with an agent that is better by ``difference`` on every task.

    Computes the sample size of a two-sided test of means (Cohen 1988, Statistical Power Analysis, section 2.4) from the
    variances of the score between and within tasks (one-way random effects; Searle, Casella and McCulloch 1992, section
    3.6). The two cannot be separated if the score has one repetition: all variance then counts as variance within
    tasks, the worst case for the same tasks.

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
        # Adds 2 because the test uses Student's t, and a tenth for ties, which permutation tests count as extreme.
        return max(math.ceil(1.1 * needed) + 2, _LEAST_TASKS)

    return [SampleSizePlan(n, tasks(within / n), tasks(between + within / n)) for n in _REPETITIONS]
