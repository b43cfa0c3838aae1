"""The policy-gradient loss: surrogates, KL estimators, aggregation over tokens.

    B   rows of a batch
    T   response tokens of a row, padded to the longest
    mask_BT    1 on tokens the policy sampled, 0 on padding and on tokens it was given
    weight_B   how many copies a row counts for; a row with 0 has no effect

Log-probabilities are natural. The numbers and gradients equal verl 0.9.1's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentlightning_algorithms.shared.policy.settings import KlEstimator, UpdateSettings, load_part

# Bounds on log-ratios and on k3 that keep exp() finite; verl's values.
_MAX_LOG_RATIO = 20.0
_MAX_LOG_SEQUENCE_RATIO = 10.0
_MAX_K3 = 10.0


class Surrogate(NamedTuple):
    """A loss per token, and how its ratio was clipped."""

    loss_BT: Tensor
    log_ratio_BT: Tensor
    """log(new / old), without gradient; its negated mean estimates KL(old || new)."""
    clipped_BT: Tensor
    """1 where clipping the ratio removed the gradient."""
    dual_clipped_BT: Tensor
    """1 where the bound on negative advantages removed the gradient."""


class LossBatch(NamedTuple):
    """All tokens of an optimizer step, for losses that need statistics of the whole batch.

    A loss is called with parts of a batch, as many rows as ``max_tokens_per_microbatch`` allows. If it is an object
    with a method ``begin(batch, settings)``, this is called first, after a pass without gradient over all rows.

    N   the tokens that count in the loss, of all rows, one row after the other
    """

    logprob_N: Tensor
    old_logprob_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    """How many copies the token's row counts for."""
    row_N: Tensor
    """Number of the token's row in the batch."""
    update: int
    """Updates that were made before this one."""
    stage: Literal["check", "train"] = "train"
    """``check``: two made rows, with which a loss is tried before the first rollout."""

    @classmethod
    def of_rows(cls, logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> LossBatch:
        """Returns made rows as a batch of the stage ``check``."""
        kept_BT = mask_BT > 0
        new_N, old_N, advantage_N = (each[kept_BT] for each in (logprob_BT.detach(), old_logprob_BT, advantage_BT))
        return cls(new_N, old_N, advantage_N, mask_BT[kept_BT], kept_BT.nonzero()[:, 0], 0, "check")


def ppo(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings
) -> Surrogate:
    """The component ``ppo``: PPO's pessimistic surrogate, negated (to minimise), for every token.

        ratio = exp(logprob - old_logprob)
        loss  = max(-A ratio, -A clamp(ratio, 1 - clip_low, 1 + clip_high))       Schulman et al. 2017, arXiv:1707.06347
        loss  = min(loss, -A dual_clip)  where A < 0                              Ye et al. 2020, arXiv:1912.09729

    ``clip_high`` above ``clip_low`` leaves unlikely tokens more room to grow (DAPO, Yu et al. 2025, arXiv:2503.14476).

    Args:
        logprob_BT: log-probabilities under the weights being trained; the only argument that gets a gradient.
        old_logprob_BT: log-probabilities under the weights that sampled the tokens.
        advantage_BT: any shape that broadcasts, such as ``[B, 1]``.
        mask_BT: 1 on tokens that count.
        settings: ``clip_low``, ``clip_high`` and ``dual_clip``.
    """
    log_ratio_BT = (logprob_BT - old_logprob_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    loss_BT, clipped_BT = _clip(log_ratio_BT.exp(), advantage_BT, settings)
    dual_clipped_BT = torch.zeros_like(clipped_BT)
    if settings.dual_clip is not None:
        bound_BT = -advantage_BT * settings.dual_clip
        negative_BT = (advantage_BT < 0).expand_as(loss_BT)
        dual_clipped_BT = ((loss_BT > bound_BT) & negative_BT).to(loss_BT.dtype)
        loss_BT = torch.where(negative_BT, torch.minimum(loss_BT, bound_BT), loss_BT)
    return Surrogate(loss_BT, log_ratio_BT.detach(), clipped_BT, dual_clipped_BT)


def gspo(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings
) -> Surrogate:
    """The component ``gspo``: one ratio for the whole row (Zheng et al. 2025, arXiv:2507.18071). Arguments as ``ppo``.

        s = exp(mean over the row's tokens of (logprob - old_logprob))
        ratio_t = sg[s] exp(logprob_t) / sg[exp(logprob_t)]      GSPO-token, equation 14: its value is s everywhere

    A row's gradient is the gradient of its length-normalised likelihood. The paper clips at 3e-4 and 4e-4 and
    aggregates by ``seq-mean-token-mean``.
    """
    log_ratio_BT = logprob_BT - old_logprob_BT
    mean_B1 = (log_ratio_BT * mask_BT).sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1.0)
    log_sequence_BT = logprob_BT - logprob_BT.detach() + mean_B1.detach()
    loss_BT, clipped_BT = _clip(log_sequence_BT.clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp(), advantage_BT, settings)
    return Surrogate(loss_BT, log_ratio_BT.detach(), clipped_BT, torch.zeros_like(clipped_BT))


def _clip(ratio_BT: Tensor, advantage_BT: Tensor, settings: UpdateSettings) -> tuple[Tensor, Tensor]:
    """Returns the larger of the losses with the ratio and with the clipped ratio, and 1 where the latter is larger."""
    free_BT = -advantage_BT * ratio_BT
    held_BT = -advantage_BT * ratio_BT.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.maximum(free_BT, held_BT), (held_BT > free_BT).to(free_BT.dtype)


def cispo(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings
) -> Surrogate:
    """The component ``cispo``: REINFORCE with a clipped ratio as weight (MiniMax 2025, arXiv:2506.13585).

        loss = -sg[clamp(ratio, 1 - clip_low, 1 + clip_high)] A logprob

    Every token keeps its gradient; clipping only bounds its size. Arguments as ``ppo``; ``clipped_BT`` is 1 where the
    weight was clipped.
    """
    log_ratio_BT = (logprob_BT - old_logprob_BT).detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    held_BT = ratio_BT.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    clipped_BT = (ratio_BT != held_BT).to(ratio_BT.dtype)
    return Surrogate(-held_BT * advantage_BT * logprob_BT, log_ratio_BT, clipped_BT, torch.zeros_like(clipped_BT))


def sapo(
    logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    settings: UpdateSettings,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """The component ``sapo``: a soft gate in the place of the clip (Gao et al. 2025, arXiv:2511.20347).

        loss = -A sigmoid(tau (ratio - 1)) 4 / tau

    The gradient falls smoothly as the ratio leaves 1, faster with a larger tau: ``tau_positive`` where A > 0, else
    ``tau_negative``. The paper aggregates by ``seq-mean-token-mean``. Other arguments as ``ppo``.
    """
    log_ratio_BT = (logprob_BT - old_logprob_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    tau_BT = torch.where(advantage_BT > 0, tau_positive, tau_negative)
    gate_BT = torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1.0)) * 4.0 / tau_BT
    zero_BT = torch.zeros_like(logprob_BT)
    return Surrogate(-advantage_BT * gate_BT, log_ratio_BT.detach(), zero_BT, zero_BT)


def gmpo(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings
) -> Surrogate:
    """The component ``gmpo``: the geometric mean of a row's clipped ratios (Zhao et al. 2025, arXiv:2507.20673).

        loss = -A exp(mean over the row's tokens of min(A l, A clamp(l, -clip_low, clip_high)) / A),  l = log(ratio)

    Every token has the loss of its row, with the mean of its advantages, so aggregate by ``seq-mean-token-mean``. The
    paper clips at 0.4 on both sides. Arguments as ``ppo``.
    """
    log_ratio_BT = logprob_BT - old_logprob_BT
    sign_BT = torch.sign(advantage_BT)
    held_BT = log_ratio_BT.clamp(-settings.clip_low, settings.clip_high)
    least_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * held_BT)
    length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1.0)
    mean_B1 = ((least_BT * mask_BT).sum(-1, keepdim=True) / length_B1).clamp(max=_MAX_LOG_SEQUENCE_RATIO)
    advantage_B1 = (advantage_BT * mask_BT).sum(-1, keepdim=True) / length_B1
    loss_BT = (-advantage_B1 * mean_B1.exp()).expand_as(log_ratio_BT)
    clipped_BT = (least_BT != log_ratio_BT).to(log_ratio_BT.dtype) * sign_BT.abs()
    return Surrogate(loss_BT, log_ratio_BT.detach(), clipped_BT, torch.zeros_like(clipped_BT))


def dppo(
    logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    settings: UpdateSettings,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    max_ratio: float = 20.0,
) -> Surrogate:
    """The component ``dppo``: tokens are left out by how far their probability moved, not by its ratio.

        loss = -sg[min(ratio, max_ratio)] A logprob    where the divergence is within its bound, else 0

    The divergence of old and new weights is over two outcomes, this token or another one: total variation (``tv``) or
    KL(old || new) (``kl``). ``clip_high`` bounds tokens with A > 0 whose probability grew, ``clip_low`` tokens with
    A <= 0 whose probability fell (arXiv:2602.04879, section 5). Other arguments as ``ppo``.
    """
    log_ratio_BT = (logprob_BT - old_logprob_BT).detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    new_BT, old_BT = logprob_BT.detach().exp(), old_logprob_BT.exp()
    moved_BT = new_BT - old_BT
    if divergence == "tv":
        distance_BT = moved_BT.abs()
    else:
        others_BT = ((1.0 - old_BT + 1e-8) / (1.0 - new_BT + 1e-8)).log()
        distance_BT = old_BT * (old_logprob_BT - logprob_BT.detach()) + (1.0 - old_BT) * others_BT
    too_high_BT = (moved_BT > 0) & (distance_BT > settings.clip_high)
    too_low_BT = (moved_BT < 0) & (distance_BT > settings.clip_low)
    clipped_BT = torch.where(advantage_BT > 0, too_high_BT, too_low_BT).to(logprob_BT.dtype)
    ratio_BT = log_ratio_BT.exp().clamp(max=max_ratio)
    loss_BT = -advantage_BT * ratio_BT * logprob_BT * (1.0 - clipped_BT)
    return Surrogate(loss_BT, log_ratio_BT, clipped_BT, torch.zeros_like(clipped_BT))


def cross_entropy(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings
) -> Surrogate:
    """The component ``cross_entropy``: the likelihood of the tokens, weighted by their advantage, without a ratio.

    With advantages of 1 for chosen answers, this is rejection fine-tuning (RAFT, Dong et al. 2023, arXiv:2304.06767);
    with ``dr_grpo``, it is the policy gradient of GPG (Chu et al. 2025, arXiv:2504.02546), which leaves out groups
    without spread, as we do.
    """
    zero_BT = torch.zeros_like(logprob_BT)
    return Surrogate(-advantage_BT * logprob_BT, (logprob_BT - old_logprob_BT).detach(), zero_BT, zero_BT)


def kl_penalty(logprob_BT: Tensor, reference_logprob_BT: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """Returns an estimate of KL(policy || reference) per token, from tokens that the policy sampled.

    With d = reference_logprob - logprob (Schulman 2020, "Approximating KL Divergence"):

        k2 = d^2 / 2         biased, low variance; its expected gradient is the gradient of KL(policy || reference)
        k3 = exp(d) - 1 - d  unbiased, never negative; its expected gradient is the gradient of KL(reference ||
                             policy); what GRPO uses (arXiv:2402.03300)

    Both gradients take the tokens as fixed, as a loss does. As in verl, d is clamped to 20 and k3 to 10.
    """
    if estimator == "k2":
        return 0.5 * (logprob_BT - reference_logprob_BT).square()
    difference_BT = (reference_logprob_BT - logprob_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (difference_BT.exp() - difference_BT - 1.0).clamp(-_MAX_K3, _MAX_K3)


class Aggregated(NamedTuple):
    """The result of a component of the kind ``aggregation``: the loss is sum(factor_B * sum of the row) / divisor."""

    factor_B: Tensor
    divisor: Tensor
    """The divisors of the parts of a batch add up to the whole batch's divisor, except for token-sum."""


def token_mean(length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor | None, horizon: int) -> Aggregated:
    """The component ``token-mean``."""
    return Aggregated(weight_B, (weight_B * length_B).sum())


def token_sum(length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor | None, horizon: int) -> Aggregated:
    """The component ``token-sum``."""
    return Aggregated(weight_B, torch.ones_like(length_B.sum()))


def seq_mean_token_sum(length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor | None, horizon: int) -> Aggregated:
    """The component ``seq-mean-token-sum``."""
    return Aggregated(weight_B, (weight_B * (length_B > 0)).sum())


def seq_mean_token_sum_norm(
    length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor | None, horizon: int
) -> Aggregated:
    """The component ``seq-mean-token-sum-norm``."""
    return Aggregated(weight_B, (weight_B * (length_B > 0)).sum() * horizon)


def seq_mean_token_mean(
    length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor | None, horizon: int
) -> Aggregated:
    """The component ``seq-mean-token-mean``."""
    return Aggregated(weight_B / length_B.clamp(min=1.0), (weight_B * (length_B > 0)).sum())


def rollout_mean(length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor | None, horizon: int) -> Aggregated:
    """The component ``rollout-mean``."""
    if rollout_length_B is None:
        raise ValueError("rollout-mean needs rollout_length_B, the tokens of each row's rollout.")
    factor_B = weight_B / rollout_length_B.clamp(min=1e-9)
    return Aggregated(factor_B, (factor_B * length_B).sum())


def find_factors(
    mask_BT: Tensor,
    aggregation: str | Mapping[str, Any],
    weight_B: Tensor | None = None,
    rollout_length_B: Tensor | None = None,
    horizon: int = 1,
) -> Aggregated:
    """Returns factors and divisor of :func:`aggregate`, which takes the same arguments.

    The divisor counts tokens (token-mean), non-empty rows (seq-mean-*; times ``horizon``), rollouts (rollout-mean), or
    is 1 (token-sum).
    """
    length_B = mask_BT.sum(-1)
    weight_B = torch.ones_like(length_B) if weight_B is None else weight_B
    component: Callable[..., tuple[Tensor, Tensor]] = load_part("aggregation", aggregation)
    return Aggregated(*component(length_B, weight_B, rollout_length_B, horizon))


def aggregate(
    value_BT: Tensor,
    mask_BT: Tensor,
    aggregation: str | Mapping[str, Any] = "token-mean",
    *,
    weight_B: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    rollout_length_B: Tensor | None = None,
    horizon: int = 1,
) -> Tensor:
    """Reduces per-token values to one number, by a component of the kind ``aggregation``.

    - ``token-mean``: mean over all tokens of the batch; long answers weigh more (DAPO, arXiv:2503.14476).
    - ``token-sum``: sum over all tokens.
    - ``seq-mean-token-sum``: mean over rows of their sums.
    - ``seq-mean-token-sum-norm``: the same, divided by a constant ``horizon`` (Dr. GRPO, arXiv:2503.20783).
    - ``seq-mean-token-mean``: mean over rows of their means (GRPO as published, arXiv:2402.03300).
    - ``rollout-mean``: mean over rollouts of the means over all their tokens, in however many rows; GRPO's formula
      with a whole rollout as output.

    Rows without tokens do not count. With the whole batch's ``normalizer``, a part of a batch gives its share of the
    loss: the shares, and their gradients, add up to the same number however the batch was split.

    Args:
        value_BT: losses or a metric; finite also where the mask is 0.
        mask_BT: 1 on tokens that count.
        aggregation: see above.
        weight_B: copies a row counts for, in the sum and in the divisor alike; None: 1.
        normalizer: the divisor (:func:`find_factors`) of the whole batch; None: of these rows.
        rollout_length_B: for rollout-mean, the tokens that count in all rows of each row's rollout, copies included.
        horizon: constant for seq-mean-token-sum-norm, such as the maximum number of tokens of a response.
    """
    factor_B, divisor = find_factors(mask_BT, aggregation, weight_B, rollout_length_B, horizon)
    return ((value_BT * mask_BT).sum(-1) * factor_B).sum() / (divisor if normalizer is None else normalizer)
