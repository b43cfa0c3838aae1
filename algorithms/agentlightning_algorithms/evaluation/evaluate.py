"""``agl.evaluate``: the score of an agent on tasks, from Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.litagent import RewardFunction
from agentlightning.resources import Resource
from agentlightning.trainer import Trainer
from agentlightning.types import Dataset, Run
from agentlightning_algorithms.evaluation.algorithm import Evaluation
from agentlightning_plugins.shared.statistics.comparison import Comparison, Group, compare_groups
from agentlightning_plugins.shared.statistics.score import Score


@dataclass(frozen=True)
class EvalResult:
    """The score of an agent. Rollouts that failed count as 0."""

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
        return compare_groups(_to_group("other", other.score), _to_group("this", self.score))


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
        timeout_s: seconds after which a rollout is stopped and counts as 0.
        **trainer: further arguments of ``Trainer``, such as ``n_runners``, ``strategy``, ``llm_proxy`` or ``run_dir``.

    Raises:
        ConfigError: there is no task, or an argument is invalid.
        LightningError: rollouts succeeded, but none of them has a reward.
    """
    algorithm = Evaluation(repetitions=repetitions, success_threshold=success_threshold, rollout_timeout_s=timeout_s)
    settings = {"trackers": [{"name": "console", "brief": True}], "initial_resources": resources, **trainer}
    run = Trainer(algorithm=algorithm, **settings).fit(agent, val_dataset=tasks, reward=reward)
    assert algorithm.score is not None, "the run succeeded"
    metrics = algorithm.score.to_metrics()
    interval = (metrics["reward_low"], metrics["reward_high"]) if "reward_low" in metrics else None
    return EvalResult(algorithm.score, run, metrics["reward"], interval, int(metrics["rollouts"]))


def _to_group(name: str, score: Score) -> Group:
    return Group(name, {f"task {index}": rewards for index, rewards in enumerate(score.rewards) if rewards})
