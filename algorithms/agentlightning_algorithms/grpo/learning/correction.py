"""Corrections for the mismatch between sampler and trainer: importance weights and trust masks, per token.

    B   rows of a batch
    T   response tokens of a row, padded to the longest
    log_ratio_BT    logprob under the trainer's weights at the start of the update - logprob as sampled
    mask_BT         1 on tokens the policy sampled

Sampler and trainer differ by kernels, precision or weights one update old; the gradient is then that of an expectation
over the wrong distribution. Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
Neither function propagates a gradient. The numbers equal verl 0.9.1's, which states the bounds of masks for 1/ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning_algorithms.grpo.settings.update import MaskLevel, WeightLevel

_MAX_LOG_RATIO = 20.0


def importance_weights(
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    level: WeightLevel = "token",
    *,
    upper: float = 2.0,
    lower: float | None = None,
) -> Tensor:
    """Returns the factor for the loss of each token; 0 outside the mask.

    Without ``lower`` weights are truncated: min(ratio, upper) (Ionides 2008; for sampler and trainer Yao et al. 2025).
    With ``lower`` they are IcePop's: the ratio within [lower, upper], 0 outside (Ling Team 2025, arXiv:2510.18855).

    ``level``: ``token`` weights each token by its own ratio, biased with low variance; ``sequence`` weights all tokens
    of a row by the product of its ratios, unbiased with high variance.
    """
    if level == "sequence":
        log_ratio_BT = (log_ratio_BT * mask_BT).sum(-1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp() * mask_BT
    if lower is None:
        return ratio_BT.clamp(max=upper)
    return torch.where((ratio_BT >= lower) & (ratio_BT <= upper), ratio_BT, 0.0)


def trusted_tokens(
    log_ratio_BT: Tensor, mask_BT: Tensor, level: MaskLevel = "token", *, lower: float = 0.5, upper: float = 2.0
) -> Tensor:
    """Returns the mask without the tokens whose ratio is outside [lower, upper].

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".

    ``level``: ``token`` drops tokens by their ratio; ``sequence`` drops rows by the product of their ratios, and
    ``sequence-mean`` by the geometric mean, which does not penalise length.
    """
    log_ratio_BT = log_ratio_BT.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if level != "token":
        total_B1 = (log_ratio_BT * mask_BT).sum(-1, keepdim=True)
        if level == "sequence-mean":
            total_B1 = total_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1.0)
        log_ratio_BT = total_B1.expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.exp()
    return mask_BT * ((ratio_BT >= lower) & (ratio_BT <= upper))
