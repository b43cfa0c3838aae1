"""The unit of training: a prompt, what the model answered, and what that was worth."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Row:
    """One model call, or consecutive calls whose tokens go on from each other, as training data.

    Attributes:
        prompt_ids: tokens the model was shown first; at least one.
        response_ids: tokens it sampled, the end token included; of several calls also what it was given between them.
        logprobs: the sampler's log-probability of each response token, taken after temperature; where the token was
            given, anything.
        advantage: of the rollout that made the call; or one for each response token, where its calls are worth
            different things.
        weight: how many copies of itself the row counts for; 0 is as if it were absent.
        mask: 1 where the response token was sampled, 0 where it was given; None: all were sampled.
        rollout: which rollout the row is of, for ``rollout-mean``; None: one of its own.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float | Sequence[float]
    weight: float = 1.0
    mask: Sequence[int] | None = None
    rollout: Hashable = None

    def sampled(self, values: Sequence[Value]) -> Sequence[Value]:
        """Picks from one value per response token those of sampled tokens."""
        if self.mask is None:
            return values
        return [value for value, sampled in zip(values, self.mask, strict=True) if sampled]

    @property
    def n_sampled(self) -> int:
        """How many tokens were sampled."""
        return len(self.response_ids) if self.mask is None else sum(map(bool, self.mask))

    @property
    def advantages(self) -> Sequence[float]:
        """One for each sampled token."""
        if isinstance(self.advantage, Sequence):
            return self.sampled(self.advantage)
        return [self.advantage] * self.n_sampled


def check_rows(rows: Sequence[Row], max_length: int) -> None:
    """Refuses rows that cannot be trained on.

    Raises:
        ValueError: a row that is empty, out of step with its log-probabilities, mask or advantages, longer than
            ``max_length``, or without a finite advantage.
    """
    for i, row in enumerate(rows):
        n_prompt, n_response = len(row.prompt_ids), len(row.response_ids)
        if not n_prompt or not n_response:
            raise ValueError(f"row {i} has {n_prompt} prompt and {n_response} response tokens; both need at least one.")
        if len(row.logprobs) != n_response:
            raise ValueError(f"row {i} has {n_response} response tokens but {len(row.logprobs)} log-probabilities.")
        if row.mask is not None and (len(row.mask) != n_response or not any(row.mask)):
            raise ValueError(
                f"row {i} has {n_response} response tokens and a mask of {len(row.mask)}, {sum(map(bool, row.mask))} "
                "of them sampled; the mask needs one entry per token and at least one sampled."
            )
        if isinstance(row.advantage, Sequence) and len(row.advantage) != n_response:
            raise ValueError(f"row {i} has {n_response} response tokens but {len(row.advantage)} advantages.")
        if n_prompt + n_response > max_length:
            raise ValueError(f"row {i} has {n_prompt + n_response} tokens; the model has {max_length} positions.")
        if not (all(map(math.isfinite, row.advantages)) and math.isfinite(row.weight) and row.weight >= 0):
            raise ValueError(
                f"row {i} has advantage {row.advantage} and weight {row.weight}; both must be finite numbers."
            )
