"""Training rows with what is fixed during an update: log-probabilities of the initial weights, and corrections.

T   sampled tokens of a row
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentlightning_algorithms.grpo.learning.correction import importance_weights, trusted_tokens
from agentlightning_algorithms.grpo.setting import UpdateSettings
from agentlightning_algorithms.grpo.training_row import TrainingRow


@dataclass(slots=True, eq=False)
class PreparedRow:
    """A row as tensors over its T sampled tokens."""

    row: TrainingRow
    old_T: Tensor
    """Log-probabilities that form the denominator of the ratio."""
    reference_T: Tensor | None
    rollout: object
    """Rows with an equal value belong to one rollout."""
    advantage_T: Tensor = field(init=False)
    kept_T: Tensor = field(init=False)
    """1 on tokens that count in the loss."""
    importance_T: Tensor = field(init=False)
    rollout_length: float = 1.0
    """Tokens that count in all rows of the rollout."""

    def __post_init__(self) -> None:
        self.old_T = self.old_T.float()
        self.advantage_T = torch.tensor(self.row.advantages, dtype=torch.float32)
        self.importance_T = self.kept_T = torch.ones(len(self.old_T))

    @property
    def log_ratio_T(self) -> Tensor:
        """Log of the ratio between trainer and sampler, where the trainer computed ``old_T``."""
        return self.old_T - torch.tensor(self.row.sampled(self.row.logprobs))


def prepare_rows(
    rows: Sequence[TrainingRow],
    old_logprobs: Sequence[Sequence[float]],
    reference_logprobs: Sequence[Sequence[float]] | None,
    settings: UpdateSettings,
) -> list[PreparedRow]:
    """Prepares rows, given one log-probability per response token under the old weights and under the reference."""
    prepared = [
        PreparedRow(
            row,
            torch.tensor(row.sampled(old_logprobs[i])),
            None if reference_logprobs is None else torch.tensor(row.sampled(reference_logprobs[i])),
            i if row.rollout is None else ("rollout", row.rollout),
        )
        for i, row in enumerate(rows)
    ]
    lengths: defaultdict[object, float] = defaultdict(float)
    for row in prepared:
        if settings.old_logprobs == "trainer":
            _correct(row, settings)
        lengths[row.rollout] += row.row.weight * float(row.kept_T.sum())
    for row in prepared:
        row.rollout_length = lengths[row.rollout]
    return prepared


def _correct(row: PreparedRow, settings: UpdateSettings) -> None:
    """Sets the row's importance weights and trust mask from the difference between sampler and trainer."""
    log_ratio_1T = row.log_ratio_T[None]
    mask_1T = torch.ones_like(log_ratio_1T)
    if settings.trust_mask is not None:
        row.kept_T = trusted_tokens(
            log_ratio_1T, mask_1T, settings.trust_mask, lower=settings.trust_lower, upper=settings.trust_upper
        )[0]
    if settings.importance_weights is not None:
        row.importance_T = importance_weights(
            log_ratio_1T,
            mask_1T,
            settings.importance_weights,
            upper=settings.importance_upper,
            lower=settings.importance_lower,
        )[0]


def describe_correction(rows: Sequence[PreparedRow], settings: UpdateSettings) -> dict[str, float]:
    """Returns metrics of the difference between sampler and trainer; empty where the trainer computed no ``old_T``."""
    if not rows or settings.old_logprobs != "trainer":
        return {}
    gaps = [float(row.log_ratio_T.abs().max()) for row in rows]
    report = {"logprob_gap_max": max(filter(math.isfinite, gaps), default=0.0)}
    if settings.trust_mask is not None:
        report["trusted_fraction"] = float(torch.cat([row.kept_T for row in rows]).mean())
    if settings.importance_weights is not None:
        weight_N = torch.cat([row.importance_T for row in rows])
        report["importance_weight"] = float(weight_N.mean())
        report["importance_weight_max"] = float(weight_N.max())
        held_N = (weight_N >= settings.importance_upper) | (weight_N == 0)
        report["importance_weight_held"] = float(held_N.float().mean())
    return report
