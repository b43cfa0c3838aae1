"""On-policy distillation: a second model scores the tokens that the policy sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.learning.served_teacher import ServedTeacher
from agentlightning_algorithms.grpo.settings import TeacherSettings
from agentlightning_algorithms.shared.policy.model.policy import Policy, load_policy
from agentlightning_algorithms.shared.policy.training_row import TrainingRow

_MAX_GAP = 10.0
"""Bound on log(teacher / policy) of a token, in nats, so that one token cannot dominate a batch."""


class Scorer(Protocol):
    """Source of log-probabilities of tokens: a :class:`Policy`, or a server's model."""

    max_length: int
    """Maximum number of tokens of a row."""

    def score(
        self, rows: Sequence[TrainingRow], temperature: float = 1.0, *, max_tokens: int = 8192
    ) -> list[list[float]]:
        """Returns the log-probability of every response token; 0 where the token was given."""
        ...


class Teacher:
    """A model whose distribution the policy is trained towards."""

    def __init__(self, scorer: Scorer, settings: TeacherSettings) -> None:
        self.scorer = scorer
        self.settings = settings

    @classmethod
    def load(cls, settings: TeacherSettings, student: Policy, *, dtype: str) -> Teacher:
        """Loads the model into this process, or finds it at its endpoint.

        Raises:
            ConfigError: the model does not exist, or its tokenizer's vocabulary differs from the policy's.
            LightningError: the endpoint does not answer.
        """
        if settings.endpoint is not None:
            return cls(ServedTeacher.connect(settings, student), settings)
        policy = load_policy(settings.model, dtype=dtype, device=str(student.device))
        if policy.tokenizer.get_vocab() != student.tokenizer.get_vocab():
            raise ConfigError(
                f"teacher: the tokenizer of {settings.model!r} has another vocabulary than the policy's; a "
                "teacher scores the policy's own tokens, so both need the same tokenizer."
            )
        for parameter in policy.model.parameters():
            parameter.requires_grad_(False)
        return cls(policy, settings)

    def guide(
        self, rows: Sequence[TrainingRow], *, temperature: float, max_tokens: int
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Returns the rows with the teacher's part added to the advantage of every sampled token, and metrics.

            gap_t = log teacher(t) - log policy(t)
            A_t   = reward_coefficient A + coefficient (gap_t - mean of the gaps of all rows)

        The negated gap is the reverse KL divergence at a token that the policy sampled (on-policy distillation, Agarwal
        et al. 2023, arXiv:2306.13649; as advantages of single tokens in Lu et al. 2025, "On-Policy Distillation"). The
        mean is a baseline: it lowers the variance of the gradient and does not change its expectation.
        """
        longest = self.scorer.max_length
        if too_long := sum(row.n_tokens > longest for row in rows):
            raise ConfigError(
                f"teacher: {too_long} rows are longer than the {longest} tokens of {self.settings.model!r}; lower "
                "max_tokens of sampling, or use a teacher with more positions."
            )
        scores = self.scorer.score(rows, temperature, max_tokens=max_tokens)
        gaps = [
            [max(-_MAX_GAP, min(_MAX_GAP, theirs - own)) for theirs, own in zip(teacher, row.logprobs, strict=True)]
            for row, teacher in zip(rows, scores, strict=True)
        ]
        sampled = [gap for row, values in zip(rows, gaps, strict=True) for gap in row.sampled(values)]
        if not sampled:
            return [], {}
        mean = math.fsum(sampled) / len(sampled)
        guided = [replace(row, advantage=self._add(row, values, mean)) for row, values in zip(rows, gaps, strict=True)]
        return guided, {"teacher_kl": -mean}

    def _add(self, row: TrainingRow, gaps: Sequence[float], mean: float) -> list[float]:
        own = row.advantage if isinstance(row.advantage, Sequence) else [row.advantage] * len(gaps)
        return [
            self.settings.reward_coefficient * value + self.settings.coefficient * (gap - mean)
            for value, gap in zip(own, gaps, strict=True)
        ]
