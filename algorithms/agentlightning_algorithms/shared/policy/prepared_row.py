"""Rows with the values that are fixed during an update: old log-probabilities, and corrections; metrics of its steps.

    B               rows of a batch
    T               sampled tokens of a row; in a batch, response tokens, padded to the longest
    log_ratio_BT    logprob under the trainer's weights at the start of the update - logprob as sampled
    mask_BT         1 on tokens the policy sampled

Sampler and trainer differ by kernels, precision or weights one update old; the gradient then averages over tokens of
the wrong distribution. Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
Neither correction propagates a gradient. The numbers equal verl 0.9.1's, which states the bounds of masks for 1/ratio.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentlightning_algorithms.shared.policy.settings import UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_plugins.shared.training_records.record import Outcome

_MAX_LOG_RATIO = 20.0


class RowUse(NamedTuple):
    """The use of a row by an update."""

    logprobs: Sequence[float] | None
    """The trainer's log-probability of each sampled token when it first used the row; None: the row was not used."""
    minibatch: int
    """Number of optimizer steps that the update made before it first used the row."""
    outcome: Outcome


@dataclass(slots=True, eq=False)
class PreparedRow:
    """A row as tensors over its T sampled tokens."""

    row: TrainingRow
    advantage_T: Tensor
    old_T: Tensor
    """Log-probabilities in the denominator of the ratio."""
    log_ratio_T: Tensor
    """``old_T`` minus the sampler's log-probabilities."""
    reference_T: Tensor | None
    kept_T: Tensor
    """1 on tokens that count in the loss."""
    importance_T: Tensor
    rollout: object
    """Rows with an equal value belong to one rollout."""
    rollout_length: float = 1.0
    """Tokens that count in all rows of the rollout."""
    first_T: Tensor | None = None
    """The trainer's log-probabilities when the row was first used."""
    minibatch: int = 0
    """Number of optimizer steps that the update made before it first used the row."""
    is_skipped: bool = False
    """Whether the loss or the gradient of its minibatch was not finite."""

    def describe_use(self) -> RowUse:
        """Returns what an update did with the row."""
        outcome: Outcome = "not_finite" if self.is_skipped else "trained"
        if not bool(self.kept_T.any()):
            outcome = "mismatch"
        return RowUse(None if self.first_T is None else self.first_T.tolist(), self.minibatch, outcome)


def prepare_rows(
    rows: Sequence[TrainingRow],
    old_logprobs: Sequence[Sequence[float]],
    reference_logprobs: Sequence[Sequence[float]] | None,
    settings: UpdateSettings,
) -> list[PreparedRow]:
    """Prepares rows, given one log-probability per response token under the old weights and under the reference."""
    prepared = []
    lengths: defaultdict[object, float] = defaultdict(float)
    for i, row in enumerate(rows):
        old_T = torch.tensor(row.sampled(old_logprobs[i])).float()
        log_ratio_T = old_T - torch.tensor(row.sampled(row.logprobs))
        reference_T = None if reference_logprobs is None else torch.tensor(row.sampled(reference_logprobs[i]))
        advantage_T = torch.tensor(row.advantages, dtype=torch.float32)
        ones_1T = torch.ones_like(log_ratio_T)[None]
        kept_T = importance_T = ones_1T[0]
        if settings.trust_mask is not None:
            kept_T = trusted_tokens(log_ratio_T[None], ones_1T, settings)[0]
        if settings.importance_weights is not None:
            importance_T = importance_weights(log_ratio_T[None], ones_1T, settings)[0]
        rollout = i if row.rollout is None else ("rollout", row.rollout)
        prepared.append(PreparedRow(row, advantage_T, old_T, log_ratio_T, reference_T, kept_T, importance_T, rollout))
        lengths[rollout] += row.weight * float(kept_T.sum())
    for each in prepared:
        each.rollout_length = lengths[each.rollout]
    return prepared


def describe_correction(rows: Sequence[PreparedRow], settings: UpdateSettings) -> dict[str, float]:
    """Returns metrics of the difference between sampler and trainer; empty if ``old_T`` is the sampler's."""
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


def importance_weights(log_ratio_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings) -> Tensor:
    """Returns the factor for the loss of each token; 0 outside the mask.

    Without ``importance_lower`` weights are truncated: min(ratio, ``importance_upper``) (Ionides 2008; for sampler and
    trainer Yao et al. 2025). With it they are IcePop's: the ratio within the bounds, 0 outside (Ling Team 2025,
    arXiv:2510.18855).

    ``token`` weights each token by its own ratio, biased with low variance; ``sequence`` weights all tokens of a row by
    the product of its ratios, unbiased with high variance.
    """
    if settings.importance_weights == "sequence":
        log_ratio_BT = (log_ratio_BT * mask_BT).sum(-1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp() * mask_BT
    lower, upper = settings.importance_lower, settings.importance_upper
    if lower is None:
        return ratio_BT.clamp(max=upper)
    return torch.where((ratio_BT >= lower) & (ratio_BT <= upper), ratio_BT, 0.0)


def trusted_tokens(log_ratio_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings) -> Tensor:
    """Returns the mask without the tokens whose ratio is outside [``trust_lower``, ``trust_upper``].

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".

    ``token`` drops tokens by their ratio; ``sequence`` drops rows by the product of their ratios, and ``sequence-mean``
    by the geometric mean, which does not penalise length.
    """
    log_ratio_BT = log_ratio_BT.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if settings.trust_mask != "token":
        total_B1 = (log_ratio_BT * mask_BT).sum(-1, keepdim=True)
        if settings.trust_mask == "sequence-mean":
            total_B1 = total_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1.0)
        log_ratio_BT = total_B1.expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.exp()
    return mask_BT * ((ratio_BT >= settings.trust_lower) & (ratio_BT <= settings.trust_upper))


class StepMetrics:
    """Sums and maxima over the micro-batches of one optimizer step, on the device: adding does not synchronize."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.real_tokens = 0
        self.padded_tokens = 0

    def add(self, **sums: Tensor) -> None:
        """Adds sums over tokens; in the report they are divided by the sum called ``tokens``."""
        for name, value in sums.items():
            self.totals[name] = self.totals[name] + value if name in self.totals else value

    def add_max(self, name: str, value: Tensor) -> None:
        """Keeps the largest value."""
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


class UpdateMetrics:
    """Metrics over the optimizer steps of one update; skipped steps are only counted."""

    def __init__(self) -> None:
        self.skipped_steps = 0
        self._optimizer_steps = self._real_tokens = self._padded_tokens = 0
        self._loss = self._grad_norm = 0.0
        names = ("tokens", "clip_fraction", "dual_clip_fraction", "approx_kl", "entropy", "ratio")
        self._totals = defaultdict(float, dict.fromkeys(names, 0.0))
        self._maxima: defaultdict[str, float] = defaultdict(float)

    def add_step(self, step: StepMetrics, loss: float, grad_norm: float) -> None:
        """Adds an optimizer step that changed the weights."""
        self._optimizer_steps += 1
        self._real_tokens += step.real_tokens
        self._padded_tokens += step.padded_tokens
        self._loss += loss
        self._grad_norm += grad_norm
        # One transfer for all values: on a GPU each transfer waits for the device.
        values = torch.stack([t.float() for t in (*step.totals.values(), *step.maxima.values())]).tolist()
        for name, value in zip(step.totals, values, strict=False):
            self._totals[name] += value
        for name, value in zip(step.maxima, values[len(step.totals) :], strict=True):
            self._maxima[name] = max(self._maxima[name], value)

    def report(self, seconds: float) -> dict[str, float]:
        """Returns means over tokens or steps, maxima and costs of this update; without steps, only counts and time."""
        steps, tokens = self._optimizer_steps, max(1.0, self._totals.pop("tokens"))
        means: dict[str, float] = {}
        if steps:  # without steps, zeros would look like measurements
            means = {
                "loss": self._loss / steps,
                "grad_norm": self._grad_norm / steps,
                **{name: total / tokens for name, total in self._totals.items()},
                **self._maxima,
                "tokens_per_s": self._real_tokens / max(seconds, 1e-9),
                "padding_fraction": 1.0 - self._real_tokens / self._padded_tokens,
            }
        return {
            **means,
            "optimizer_steps": float(self._optimizer_steps),
            "skipped_steps": float(self.skipped_steps),
            "seconds": seconds,
        }
