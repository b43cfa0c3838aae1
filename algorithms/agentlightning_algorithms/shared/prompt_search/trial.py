"""Trials: the rollouts of a candidate on some tasks; the last one compares the first and the best prompt again."""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning import semconv
from agentlightning.adapter.adapter import reading
from agentlightning.adapter.call import State, find_states
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.reward import Feedback, find_feedback
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Dataset, Rollout
from agentlightning_algorithms.shared.prompt_search.budget import CallUsage, read_usage
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate
from agentlightning_algorithms.shared.rollout_result import RolloutResult, read_result
from agentlightning_plugins.shared.chat_history import ChatHistory, TraceToMessages
from agentlightning_plugins.shared.statistics.interval import Interval, paired_interval, paired_p_value, variance

LEVEL: Final = 0.05
"""Significance level of a confirmation."""


@dataclass(frozen=True)
class TrialResult(RolloutResult):
    """A finished rollout as a critic reads it."""

    messages: Sequence[ChatHistory] = ()
    """The chat of each model call."""
    usage: Sequence[CallUsage] = ()
    adapter_error: str | None = None
    failed_reward: float = 0.0
    """The score if the rollout failed or has no reward."""

    @property
    def score(self) -> float:
        """The reward, or ``failed_reward``."""
        return self.failed_reward if self.valid_reward is None else self.valid_reward

    @property
    def rollout_id(self) -> str:
        return self.rollout.rollout_id

    @property
    def task(self) -> Any:
        return self.rollout.input

    @property
    def status(self) -> str:
        """The rollout's status, or ``timeout``."""
        rollout = self.rollout
        timed_out = isinstance(rollout, AttemptedRollout) and rollout.attempt.status == "timeout"
        if rollout.status == "cancelled" or (rollout.status == "failed" and timed_out):
            return "timeout"
        return rollout.status

    @property
    def error(self) -> str | None:
        """The agent's exception, or why its spans cannot be read."""
        return self.adapter_error if self.failure is None else f"{self.failure.type}: {self.failure.message}"

    @property
    def feedback(self) -> list[Feedback]:
        """Why the result is good or bad, from the agent, its reward function, a judge and failed tools."""
        return find_feedback(self.spans)

    @property
    def states(self) -> list[State]:
        """The semantic variables of the agent, as they changed."""
        return find_states(self.spans)

    @property
    def output(self) -> str | None:
        """The recorded output of the agent: the standard output of a command; None for other agents."""
        name = semconv.GEN_AI_OPERATION_NAME
        runs = [span.attributes for span in self.spans if span.attributes.get(name) == "invoke_agent"]
        return next((str(text) for each in runs if (text := each.get(semconv.OPERATION_OUTPUT))), None)


def mean_score(results: Sequence[TrialResult]) -> float:
    """Mean of the scores."""
    return statistics.fmean(result.score for result in results) if results else 0.0


async def read_trial_result(store: LightningStore, rollout: Rollout, adapter: TraceToMessages | None) -> TrialResult:
    """Reads the result of a rollout that has ended; its chats are read only if there is an adapter."""
    result = await read_result(store, rollout)
    messages: Sequence[ChatHistory] = ()
    usage: Sequence[CallUsage] = ()
    error = None
    try:
        with reading(result.spans):
            messages = adapter.adapt(result.spans) if adapter is not None else ()
            usage = read_usage(result.spans)
    except AdapterError as adapter_error:
        error = str(adapter_error)
    return TrialResult(rollout, result.spans, result.reward, tuple(messages), tuple(usage), error)


def call_place(stage: str, prompt: Candidate, name: str, results: Sequence[TrialResult], sample: int = 0) -> str:
    """Identifies one of the model calls about a prompt and rollouts: a resumed run makes the same rollouts."""
    text = "/".join((prompt.candidate_id, name, str(sample), *(result.rollout_id for result in results)))
    return f"{stage}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


@dataclass(frozen=True)
class Confirmation:
    """Mean rewards of the first and the best prompt on the same tasks, in rollouts that did not select the best."""

    first: float
    best: float
    p_value: float
    """One-sided p-value of the hypothesis that the best prompt is not better on these tasks."""
    pairs: int
    interval: Interval | None = None
    """95 % interval of the gain; None if the pairs do not determine one."""
    error: float = 0.0
    """Standard error of the gain."""

    @property
    def is_better(self) -> bool:
        """Whether the best prompt earned more than the first."""
        return self.best > self.first

    @property
    def is_confirmed(self) -> bool:
        """Whether it is unlikely that the best prompt earned more by chance alone."""
        return self.is_better and self.p_value <= LEVEL

    @property
    def gain(self) -> float:
        """The expected gain: the difference of the means, reduced the more the less certain it is.

        Prompts that are published because they earned more were lucky on average. This is the positive-part estimator
        of James and Stein 1961.
        """
        difference = self.best - self.first
        return difference * max(1 - (self.error / difference) ** 2, 0.0) if difference else 0.0


async def confirm(
    first: Candidate,
    best: Candidate,
    tasks: Sequence[int],
    n_pairs: int,
    score: Callable[[Candidate, Sequence[int], int], Awaitable[Sequence[float]]],
) -> Confirmation:
    """Runs two prompts on the same tasks again, ``n_pairs`` times in all.

    The highest of many scores is too high on average even if all prompts are equal (the winner's curse; Andrews,
    Kitagawa and McCloskey 2024, Inference on winners, QJE 139). Fresh rollouts had no part in the selection. The pairs
    are compared by a permutation test that flips signs, which is exact if both prompts are equally good on each task.
    """
    batches = [tasks[: n_pairs - start] for start in range(0, n_pairs, len(tasks))]

    async def score_all(candidate: Candidate) -> list[float]:
        found = await asyncio.gather(*(score(candidate, batch, number) for number, batch in enumerate(batches)))
        return [reward for rewards in found for reward in rewards]

    before, after = await asyncio.gather(score_all(first), score_all(best))
    gains = [new - old for new, old in zip(after, before, strict=True)]
    error = math.sqrt(variance(gains) / n_pairs)
    interval = paired_interval(gains)
    p_value = paired_p_value(gains) / 2
    return Confirmation(statistics.fmean(before), statistics.fmean(after), p_value, n_pairs, interval, error)


def check_datasets(
    train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Returns the training and the validation tasks; if one dataset is missing, the other is used for both."""
    train = train_dataset if train_dataset is not None and len(train_dataset) else val_dataset
    val = val_dataset if val_dataset is not None and len(val_dataset) else train_dataset
    if train is None or val is None or not len(train):
        raise ConfigError("a prompt search needs tasks: give a train_dataset, and a val_dataset to compare prompts on")
    return train, val
