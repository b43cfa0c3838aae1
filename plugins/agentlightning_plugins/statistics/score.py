"""The score of an agent over repeated tasks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentlightning_plugins.statistics.significance import mean_interval, paired_p_value


@dataclass(frozen=True)
class Score:
    """Rewards of an evaluation. Rollouts that failed or have no reward count as 0."""

    rewards: Sequence[Sequence[float]]
    """By task, by repetition."""
    success_threshold: float = 1.0
    """A reward of at least this is a success."""
    errors: Counter[str] = field(default_factory=Counter)
    """Failed rollouts by type of error."""

    @property
    def mean(self) -> float:
        """Mean reward over tasks."""
        return statistics.fmean(self.by_task())

    def by_task(self) -> list[float]:
        """Mean reward of each task: its repetitions are not independent of each other."""
        return [statistics.fmean(task) for task in self.rewards]

    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean."""
        return mean_interval(self.by_task())

    def pass_at(self, k: int) -> float:
        """Probability that one of k repetitions succeeds, averaged over tasks; k is at most the repetitions made.

        The unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al. 2021, arXiv:2107.03374, equation 1.
        """
        values = []
        for task in self.rewards:
            n, c = len(task), sum(reward >= self.success_threshold for reward in task)
            values.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
        return statistics.fmean(values)

    def p_value(self, other: Score) -> float:
        """p-value of the hypothesis that two agents are equally good, from the same tasks in the same order."""
        pairs = zip(self.by_task(), other.by_task(), strict=True)
        return paired_p_value([mine - theirs for mine, theirs in pairs])

    def to_metrics(self) -> dict[str, float]:
        """The numbers by name, as trackers take them."""
        low, high = self.interval()
        repetitions = len(self.rewards[0])
        ks = sorted({1, *(2**power for power in range(1, 10) if 2**power <= repetitions), repetitions})
        return {
            "reward": self.mean,
            "reward_low": low,
            "reward_high": high,
            **{f"pass@{k}": self.pass_at(k) for k in ks},
            "tasks": float(len(self.rewards)),
            "rollouts": float(sum(map(len, self.rewards))),
            **{f"errors/{name}": float(count) for name, count in self.errors.items()},
        }
