"""The score of an agent over repeated tasks, and the difference between two scores."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.reward import count_failed
from agentlightning_plugins.shared.statistics.interval import (
    Interval,
    mean_interval,
    normal_quantile,
    t_quantile,
    variance,
    wilson,
)


@dataclass(frozen=True)
class Score:
    """Rewards of an evaluation; ``missing`` counts the rollouts without a reward."""

    outcomes: Sequence[Sequence[float | None]]
    """Reward of each repetition of each task, None if it failed; shorter where rewards are missing."""
    success_threshold: float = 1.0
    """A reward of at least this is a success."""
    errors: Counter[str] = field(default_factory=Counter)
    """Number of failed rollouts by type of error."""
    missing: int = 0
    """Number of rollouts that succeeded without a reward; they are excluded from ``rewards``."""
    failed_reward: float = 0.0
    """Reward of a rollout that failed, unless the lowest reward of the evaluation is lower: then that one."""

    @cached_property
    def rewards(self) -> Sequence[Sequence[float]]:
        """Rewards of each task, including failed rollouts."""
        failed = count_failed((reward for task in self.outcomes for reward in task), self.failed_reward)
        return [[failed if reward is None else reward for reward in task] for task in self.outcomes]

    @property
    def mean(self) -> float:
        """Mean reward over tasks."""
        return statistics.fmean(self._rated())

    def by_task(self) -> list[float | None]:
        """Mean reward of each task, None if it has no reward; the repetitions of a task depend on each other."""
        return [statistics.fmean(task) if task else None for task in self.rewards]

    def _rated(self) -> list[float]:
        found = [mean for mean in self.by_task() if mean is not None]
        if not found:
            raise NotFoundError(f"none of {len(self.rewards)} tasks has a reward; the agent must return or emit one")
        return found

    def interval(self, confidence: float = 0.95) -> Interval | None:
        """Confidence interval of the mean reward over similar tasks; None for one task.

        For rewards of 0 and 1, Wilson's interval with the effective number of independent rollouts, which lies between
        the numbers of tasks and of rollouts and is corrected for the degrees of freedom, the number of tasks minus one
        (Korn and Graubard 1998, Survey Methodology 24, section 3). For other rewards see ``mean_interval``.
        """
        means = self._rated()
        rollouts = [reward for task in self.rewards for reward in task]
        if len(means) < 2 or not set(rollouts) <= {0, 1}:
            return mean_interval(means, confidence)
        rate, spread = statistics.fmean(means), variance(means)
        if rate in (0.0, 1.0):
            return wilson(rate, len(means), confidence)
        independent = rate * (1 - rate) / spread * len(means) if spread > 0 else math.inf
        independent = min(independent, len(rollouts)) * (1.96 / t_quantile(len(means) - 1)) ** 2
        return wilson(rate, max(independent, len(means)), confidence)

    def tasks_for(self, least: float, confidence: float) -> int | None:
        """Number of such tasks whose interval would be above ``least``; None if the mean is not above it.

        Rewards of 0 and 1: by Wilson's interval, of independent rollouts; others: by their variance between tasks.
        """
        means = self._rated()
        mean, z = statistics.fmean(means), normal_quantile(confidence)
        if mean <= least:
            return None
        if {reward for task in self.rewards for reward in task} <= {0, 1}:
            # Wilson's interval excludes a rate if it is z standard errors of that rate away.
            return math.ceil(z**2 * max(least, 0.0) * (1 - least) / (mean - least) ** 2)
        return math.ceil(z**2 * variance(means) / (mean - least) ** 2)

    def pass_at(self, k: int) -> float:
        """Probability that one of k repetitions succeeds, averaged over the tasks with at least k rewards.

        The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021, arXiv:2107.03374, equation 1.

        Raises:
            ConfigError: k is less than 1, or no task has k rewards.
        """
        known = [task for task in self.outcomes if len(task) >= k >= 1]
        if not known:
            most = max(map(len, self.outcomes), default=0)
            raise ConfigError(f"pass@{k} needs a k from 1 to {most}, the number of rewards of a task; add repetitions")
        threshold = self.success_threshold
        counts = [(len(task), sum(each is not None and each >= threshold for each in task)) for task in known]
        return statistics.fmean(1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts)

    def to_metrics(self) -> dict[str, float]:
        """Returns the metrics by name, as trackers accept them; one task has no ``reward_low`` and ``reward_high``."""
        interval = self.interval()
        repetitions = max(map(len, self.rewards))
        ks = sorted({1, *(2**power for power in range(1, 10) if 2**power <= repetitions), repetitions})
        return {
            "reward": self.mean,
            **({} if interval is None else {"reward_low": interval[0], "reward_high": interval[1]}),
            **{f"pass@{k}": self.pass_at(k) for k in ks},
            "tasks": float(len(self.rewards)),
            "rollouts": float(sum(map(len, self.rewards)) + self.missing),
            **({"missing": float(self.missing)} if self.missing else {}),
            **{f"errors/{name}": float(count) for name, count in self.errors.items()},
        }


FAILED: Final = "failed rollouts count as 0, or as the lowest reward if that is negative"


def count_failed_alike(scores: Sequence[Score]) -> list[Score]:
    """Returns the scores with the same reward for failed rollouts in all of them, so that they can be compared."""
    rewards = (reward for score in scores for task in score.outcomes for reward in task)
    failed_reward = count_failed(rewards, min(score.failed_reward for score in scores))
    return [replace(score, failed_reward=failed_reward) for score in scores]


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
