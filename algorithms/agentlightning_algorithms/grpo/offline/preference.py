"""Losses of pairs of answers, by how much more the model prefers the chosen answer than the reference does."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

LossName = Literal["sigmoid", "ipo", "hinge"]


class PairLoss(NamedTuple):
    """The loss of a pair, and its derivative with respect to the margin."""

    value: float
    slope: float


def pair_loss(margin: float, loss: LossName, beta: float, label_smoothing: float = 0.0) -> PairLoss:
    """Returns the loss of one pair.

    The margin is the difference, between the chosen and the rejected answer, of log(policy / reference), summed over
    the tokens of an answer (``ipo``: averaged).

        sigmoid   -log sigmoid(beta margin)           DPO, Rafailov et al. 2023, arXiv:2305.18290
        ipo       (margin - 1 / (2 beta))^2           Azar et al. 2023, arXiv:2310.12036
        hinge     max(0, 1 - beta margin)             SLiC-HF, Zhao et al. 2023, arXiv:2305.10425

    Args:
        margin: see above.
        loss: see above.
        beta: how strongly the policy is held near the reference; above 0.
        label_smoothing: for ``sigmoid``, the probability that a label is wrong (conservative DPO, Mitchell 2023).
    """
    if loss == "ipo":
        distance = margin - 1.0 / (2.0 * beta)
        return PairLoss(distance * distance, 2.0 * distance)
    if loss == "hinge":
        missing = 1.0 - beta * margin
        return PairLoss(missing, -beta) if missing > 0 else PairLoss(0.0, 0.0)
    logit = beta * margin
    share = label_smoothing
    value = (1.0 - share) * _softplus(-logit) + share * _softplus(logit)
    return PairLoss(value, beta * (_sigmoid(logit) - (1.0 - share)))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
