"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning_algorithms.grpo.learning.loss import Surrogate
from agentlightning_algorithms.grpo.setting import UpdateSettings


def likelihood(
    logprob_BT: Tensor, old_logprob_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, settings: UpdateSettings
) -> Surrogate:
    """Returns the negative log-likelihood of every token, times its advantage."""
    none_BT = torch.zeros_like(logprob_BT)
    return Surrogate(-advantage_BT * logprob_BT, none_BT, none_BT, none_BT)
