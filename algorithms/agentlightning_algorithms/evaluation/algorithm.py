"""``evaluation``: runs the agent over a dataset several times and says how good it is, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithm.algorithm import FastAlgorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.reward import read_final_reward
from agentlightning.types import AttemptedRollout, Dataset, EnqueueRolloutRequest, RolloutConfig, RolloutMode
from agentlightning_plugins.statistics.significance import mean_interval, paired_p_value

_AT_ONCE = 256
"""Rollouts that are queued and waited for together, so that a long dataset is never in memory as a whole."""


@dataclass(frozen=True)
class Score:
    """What was found. Rollouts that failed or said no reward count as 0."""

    rewards: Sequence[Sequence[float]]
    """By task, by repetition."""
    success_threshold: float = 1.0
    """A reward of at least this is a success."""
    errors: Counter[str] = field(default_factory=Counter)
    """Rollouts that failed, by type of error."""

    @property
    def mean(self) -> float:
        """Mean reward over tasks."""
        return statistics.fmean(self.by_task())

    def by_task(self) -> list[float]:
        """Mean reward of each task: repetitions of one are not independent."""
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
        """That two agents are equally good, from their mean rewards on the same tasks in one order."""
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


class Evaluation(FastAlgorithm):
    """Runs every task ``repetitions`` times with the latest resources, and keeps the ``score``."""

    Score = Score
    """What is found; also made from rewards by task and repetition that something else measured."""

    def __init__(
        self,
        *,
        repetitions: int = 1,
        success_threshold: float = 1.0,
        mode: RolloutMode = "test",
        rollout_timeout_s: float | None = None,
        name: str = "evaluation",
    ) -> None:
        """Sets how much is run.

        Args:
            repetitions: rollouts of each task; pass@k is known up to this k.
            success_threshold: a reward of at least this is a success.
            mode: of the rollouts.
            rollout_timeout_s: seconds after which a rollout is stopped and counts as 0.
            name: several evaluations of one run need a name each.

        Raises:
            ConfigError: a value out of range.
        """
        require_least(1, repetitions=repetitions)
        self.repetitions = repetitions
        self.success_threshold = success_threshold
        self.mode: RolloutMode = mode
        # A rollout whose runner was lost says nothing about the agent: it is run again.
        self.config = RolloutConfig(timeout_seconds=rollout_timeout_s, max_attempts=3, retry_condition=["unresponsive"])
        self.name = name
        self.score: Score | None = None

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Evaluates the validation data, or the training data when there is no other."""
        dataset = val_dataset if val_dataset is not None else train_dataset
        if dataset is None:
            raise ConfigError("evaluation needs a dataset")
        places = [(task, repetition) for task in range(len(dataset)) for repetition in range(self.repetitions)]
        rewards: list[list[float]] = [[] for _ in range(len(dataset))]
        errors: Counter[str] = Counter()
        for start in range(0, len(places), _AT_ONCE):
            for (task, _), (reward, error) in zip(
                places[start : start + _AT_ONCE],
                await self._run_some(dataset, places[start : start + _AT_ONCE]),
                strict=True,
            ):
                rewards[task].append(reward)
                errors.update([error] if error is not None else [])
        self.score = Score(rewards, self.success_threshold, errors)
        await self.get_store().add_metrics(1, self.score.to_metrics())

    async def _run_some(
        self, dataset: Dataset[Any], places: Sequence[tuple[int, int]]
    ) -> list[tuple[float, str | None]]:
        store = self.get_store()
        requests = [
            EnqueueRolloutRequest(
                input=dataset[task],
                mode=self.mode,
                config=self.config,
                metadata={"task_id": task, "repetition": repetition},
                rollout_id=self.context.rollout_id(self.name, task, repetition),
            )
            for task, repetition in places
        ]
        queued = await store.enqueue_many_rollouts(requests)
        ended = await store.wait_for_rollouts([rollout.rollout_id for rollout in queued])
        results: list[tuple[float, str | None]] = []
        for rollout in ended:
            reward = await read_final_reward(store, rollout)
            error = None
            if rollout.status != "succeeded":
                attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
                error = attempt.error.type if attempt is not None and attempt.error is not None else rollout.status
            results.append((reward if reward is not None and error is None else 0.0, error))
        return results
