"""The unit of training: a prompt, the model's response, and its advantage."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Distribution(NamedTuple):
    """How tokens are drawn from logits; ``SamplingParams`` of ``sampling.draw`` explains the values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One model call, or consecutive calls, each of which extends the tokens of the previous call.

    Attributes:
        prompt_ids: tokens before the first response; at least one.
        response_ids: sampled tokens, stop token included; with several calls also the tokens given between them.
        logprobs: the sampler's log-probability of each response token, after temperature; ignored where the token was
            given.
        advantage: one value for the row, or one per response token if the row's calls have different advantages.
        weight: how many copies the row counts for; a row with 0 has no effect.
        mask: 1 where the response token was sampled, 0 where it was given; None: all were sampled.
        rollout: the rollout the row belongs to, for ``rollout-mean``; None: the row is its own rollout.
        distribution: distribution that the tokens were drawn from; None: the trainer's temperature, unfiltered.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float | Sequence[float]
    weight: float = 1.0
    mask: Sequence[int] | None = None
    rollout: Hashable = None
    distribution: Distribution | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    def is_within(self, max_length: int, vocabulary: int) -> bool:
        """Whether a model with so many positions and token ids can read the row."""
        return self.n_tokens <= max_length and max(*self.prompt_ids, *self.response_ids) < vocabulary

    def sampled(self, values: Sequence[Value]) -> Sequence[Value]:
        """Returns the values of the sampled tokens, given one value per response token."""
        if self.mask is None:
            return values
        return list(compress(values, self.mask))

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.response_ids) if self.mask is None else sum(map(bool, self.mask))

    @property
    def advantages(self) -> Sequence[float]:
        """The advantage of each sampled token."""
        if isinstance(self.advantage, Sequence):
            return self.sampled(self.advantage)
        return [self.advantage] * self.n_sampled


def check_rows(rows: Sequence[TrainingRow], max_length: int) -> None:
    """Checks that rows can be trained on.

    Raises:
        ValueError: a row is empty, longer than ``max_length``, has log-probabilities, mask or advantages of the
            wrong length, or has no finite advantage.
    """
    for i, row in enumerate(rows):
        n_prompt, n_response = len(row.prompt_ids), len(row.response_ids)
        if not n_prompt or not n_response:
            raise ValueError(f"row {i} has {n_prompt} prompt and {n_response} response tokens; both need at least one.")
        by_token = {"log-probabilities": row.logprobs, "mask entries": row.mask, "advantages": row.advantage}
        for name, values in by_token.items():
            if isinstance(values, Sequence) and len(values) != n_response:
                raise ValueError(f"row {i} has {n_response} response tokens but {len(values)} {name}.")
        if not row.n_sampled:
            raise ValueError(f"row {i} has a mask without a sampled token.")
        if row.n_tokens > max_length:
            raise ValueError(f"row {i} has {row.n_tokens} tokens; the model has {max_length} positions.")
        if not (all(map(math.isfinite, row.advantages)) and math.isfinite(row.weight) and row.weight >= 0):
            raise ValueError(
                f"row {i} has advantage {row.advantage} and weight {row.weight}; both must be finite and weight >= 0."
            )
