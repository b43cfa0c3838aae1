"""``evaluation``: runs the agent over a dataset several times and estimates how good it is, with an interval."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.algorithm import FastAlgorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.settings import require_least
from agentlightning.resources import Resource
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutMode, Run
from agentlightning_algorithms.shared.rollout_result import RewardCheck, read_result, retry_lost, run_rollouts
from agentlightning_plugins.shared.statistics.score import Score, count_failed_alike

if TYPE_CHECKING:
    from agentlightning.litagent import RewardFunction
    from agentlightning_plugins.shared.statistics.comparison import Comparison

_BATCH_SIZE = 256
"""Rollouts that are queued and waited for together, so that a large dataset is never held in memory as a whole."""


@dataclass(eq=False, repr=False, kw_only=True)
class Evaluation(FastAlgorithm):
    """Runs every task ``repetitions`` times with the latest resources, and keeps the ``score``.

    A rollout that succeeded without a reward is excluded and counted as missing.
    """

    repetitions: int = 1
    """Rollouts of each task; pass@k is known up to this k."""
    success_threshold: float = 1.0
    """A reward of at least this is a success."""
    mode: RolloutMode = "test"
    rollout_timeout_s: float | None = None
    """Seconds after which a rollout is stopped and has failed."""
    name: str = "evaluation"
    """Distinguishes this evaluation from others of the same run."""
    score: Score | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require_least(1, repetitions=self.repetitions)
        self.config = retry_lost(self.rollout_timeout_s)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Evaluates the validation data, or the training data when there is no validation data."""
        dataset = val_dataset if val_dataset is not None else train_dataset
        if dataset is None or not len(dataset):
            raise ConfigError("evaluation needs tasks, but the dataset is empty; check data.val or --data")
        store = self.get_store()
        repeated = [(task, repetition) for task in range(len(dataset)) for repetition in range(self.repetitions)]
        rewards: list[list[float | None]] = [[] for _ in range(len(dataset))]
        errors: Counter[str] = Counter()
        missing, check = 0, RewardCheck()
        for start in range(0, len(repeated), _BATCH_SIZE):
            batch = repeated[start : start + _BATCH_SIZE]
            requests = [
                EnqueueRolloutRequest(
                    input=dataset[task],
                    mode=self.mode,
                    config=self.config,
                    metadata={"step": 1, "task_id": task, "repetition": repetition},
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
                rewards[task] += [] if is_missing else [result.valid_reward]
                errors.update([result.error_type] if result.error_type is not None else [])
        self.score = Score(rewards, self.success_threshold, errors, missing)
        await store.add_metrics(1, self.score.to_metrics())


@dataclass(frozen=True)
class EvalResult:
    """The score of an agent. Rollouts that failed count as 0, or as the lowest reward if that is negative."""

    score: Score = field(repr=False)
    run: Run = field(repr=False)
    mean: float
    """Mean reward over tasks."""
    interval: tuple[float, float] | None
    """95 % interval of the mean; None if there is only one task."""
    n_rollouts: int

    @property
    def rewards(self) -> Sequence[Sequence[float]]:
        """The rewards of each task's repetitions, in the order of the tasks."""
        return self.score.rewards

    @property
    def errors(self) -> Counter[str]:
        """Number of failed rollouts by type of error."""
        return self.score.errors

    def pass_at(self, k: int) -> float:
        """Probability that one of k repetitions succeeds, averaged over tasks; k is at most ``repetitions``."""
        return self.score.pass_at(k)

    def compare(self, other: EvalResult) -> Comparison:
        """Returns the difference from ``other`` on the same tasks, with its interval and p-value.

        Raises:
            ConfigError: the results have different numbers of tasks.
        """
        if len(self.rewards) != len(other.rewards):
            raise ConfigError(
                f"{len(self.rewards)} and {len(other.rewards)} tasks cannot be compared one by one; evaluate both "
                "agents on the same tasks"
            )
        from agentlightning_plugins.shared.statistics.comparison import Group, compare_groups

        scores = count_failed_alike([other.score, self.score])
        groups = [
            Group(name, {f"task {index}": rewards for index, rewards in enumerate(score.rewards) if rewards})
            for name, score in zip(("other", "this"), scores, strict=True)
        ]
        return compare_groups(*groups)


def evaluate(
    agent: Any,
    tasks: Dataset[Any],
    *,
    reward: RewardFunction | None = None,
    resources: Mapping[str, Resource | str] | None = None,
    repetitions: int = 1,
    success_threshold: float = 1.0,
    timeout_s: float | None = None,
    **trainer: Any,
) -> EvalResult:
    """Runs an agent on tasks and returns its score. Nothing is learned.

    Args:
        agent: as in ``Trainer.fit``.
        tasks: a sequence of tasks.
        reward: ``reward(task, output, rollout)``, for agents that do not emit their reward themselves.
        resources: the agent's prompts and models, such as ``{"prompt": apo.get_best_prompt()}``.
        repetitions: rollouts of each task; pass@k is known up to this k.
        success_threshold: a reward of at least this is a success, for pass@k.
        timeout_s: seconds after which a rollout is stopped and has failed.
        **trainer: further arguments of ``Trainer``, such as ``n_runners``, ``strategy``, ``llm_proxy`` or ``run_dir``.

    Raises:
        ConfigError: there is no task, or an argument is invalid.
        LightningError: rollouts succeeded, but none of them has a reward.
    """
    from agentlightning.trainer import Trainer  # commands that evaluate nothing load this plugin too

    algorithm = Evaluation(repetitions=repetitions, success_threshold=success_threshold, rollout_timeout_s=timeout_s)
    settings = {"trackers": [{"name": "console", "brief": True}], "initial_resources": resources, **trainer}
    run = Trainer(algorithm=algorithm, **settings).fit(agent, val_dataset=tasks, reward=reward)
    score = algorithm.score
    assert score is not None, "the run succeeded"
    return EvalResult(score, run, score.mean, score.interval(), sum(map(len, score.rewards)) + score.missing)


@hookimpl
def components() -> list[Component]:
    target = "agentlightning_algorithms.evaluation:Evaluation"
    return [Component("algorithm", "evaluation", target, summary="measures an agent, without training")]
