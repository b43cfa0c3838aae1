"""``evaluation``: runs the agent over a dataset several times and estimates how good it is, with an interval."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithm.algorithm import FastAlgorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutMode
from agentlightning_algorithms.shared.rollout_result import RewardCheck, read_result, retry_lost, run_rollouts
from agentlightning_plugins.shared.statistics.score import Score

_BATCH_SIZE = 256
"""Rollouts that are queued and waited for together, so that a large dataset is never held in memory as a whole."""


@dataclass(eq=False, repr=False, kw_only=True)
class Evaluation(FastAlgorithm):
    """Runs every task ``repetitions`` times with the latest resources, and keeps the ``score``.

    A rollout that failed counts as 0. A rollout that succeeded without a reward is excluded and counted as missing.
    """

    repetitions: int = 1
    """Rollouts of each task; pass@k is known up to this k."""
    success_threshold: float = 1.0
    """A reward of at least this is a success."""
    mode: RolloutMode = "test"
    rollout_timeout_s: float | None = None
    """Seconds after which a rollout is stopped and counts as 0."""
    name: str = "evaluation"
    """Distinguishes this evaluation from others of the same run."""
    score: Score | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_least(1, repetitions=self.repetitions)
        self.config = retry_lost(self.rollout_timeout_s)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Evaluates the validation data, or the training data when there is no validation data.

        Raises:
            LightningError: the first rollouts that succeeded have no reward.
        """
        dataset = val_dataset if val_dataset is not None else train_dataset
        if dataset is None:
            raise ConfigError("evaluation needs a dataset")
        if not len(dataset):
            raise ConfigError("evaluation needs tasks, but the dataset is empty; check data.val or --data")
        store = self.get_store()
        repeated = [(task, repetition) for task in range(len(dataset)) for repetition in range(self.repetitions)]
        rewards: list[list[float]] = [[] for _ in range(len(dataset))]
        errors: Counter[str] = Counter()
        missing, check = 0, RewardCheck()
        for start in range(0, len(repeated), _BATCH_SIZE):
            batch = repeated[start : start + _BATCH_SIZE]
            requests = [
                EnqueueRolloutRequest(
                    input=dataset[task],
                    mode=self.mode,
                    config=self.config,
                    metadata={"task_id": task, "repetition": repetition},
                    rollout_id=self.context.rollout_id(self.name, task, repetition),
                )
                for task, repetition in batch
            ]
            ended = await run_rollouts(store, requests)
            results = await asyncio.gather(*(read_result(store, rollout) for rollout in ended))
            if any(result.error_type is None for result in results):  # if all failed, the score shows it
                check.add((result.outcome for result in results), is_last=True)
            for (task, _), result in zip(batch, results, strict=True):
                is_missing = result.error_type is None and result.reward is None
                missing += is_missing
                rewards[task] += [] if is_missing else [result.score]
                errors.update([result.error_type] if result.error_type is not None else [])
        self.score = Score(rewards, self.success_threshold, errors, missing)
        await store.add_metrics(1, self.score.to_metrics())
