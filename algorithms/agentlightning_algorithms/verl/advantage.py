"""Advantages of rollouts, for estimators that compare the rollouts of a task, and of calls with a credit rule.

Except for ``grpo``, verl's estimators treat every row as a rollout, so that a rollout with more rows weighs more in its
group's baseline. Here each rollout is represented by its last row that has a token to train on, and all its
rows get that row's advantage.

B   rows          R   rollouts          T   tokens of the longest response
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_remax_outcome_advantage, register_adv_est
from verl.trainer.ppo.ray_trainer import compute_advantage

from agentlightning_algorithms.shared.advantage import Estimator, Scored, compute_advantages
from agentlightning_algorithms.verl.batch_row import REMAX, CallCredit

OF_GROUPS: Final = frozenset(
    {"gpg", "grpo_passk", "grpo_vectorized", "opo", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized"}
)
"""Estimators whose advantage is one number per rollout."""


@register_adv_est(REMAX)  # type: ignore[untyped-decorator] # of verl
def remax_without_baseline(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns verl's advantages and returns (B, T) for baselines of 0; the trainer subtracts the baselines."""
    found: tuple[torch.Tensor, torch.Tensor] = compute_remax_outcome_advantage(
        token_level_rewards, torch.zeros(len(token_level_rewards)), response_mask
    )
    return found


def subtract_baselines(advantages_BT: torch.Tensor, baselines_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Subtracts the rewards of greedy rollouts, as in ReMax, Li et al. 2023, arXiv:2310.10505."""
    return advantages_BT - baselines_B.unsqueeze(-1) * mask_BT


def last_rows(keys: Sequence[str], has_tokens: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Finds the last row with tokens of each rollout, or its last one if no row has any.

    ``keys`` of rows are ``{group}_{rollout}_{row}``. A row whose tokens were all rejected has no tokens: its mask is 0.

    Returns:
        The position of each rollout's chosen row, and for every row the index of its rollout among the rollouts.
    """
    last: dict[str, tuple[bool, int, int]] = {}
    owners = []
    for position, (key, has) in enumerate(zip(keys, has_tokens, strict=True)):
        rollout, _, row = key.rpartition("_")
        owners.append(rollout)
        last[rollout] = max(last.get(rollout, (False, -1, -1)), (has, int(row), position))
    places = {rollout: place for place, rollout in enumerate(last)}
    return [position for *_, position in last.values()], [places[rollout] for rollout in owners]


def rollout_advantages(data: DataProto, keys: Sequence[str], estimator: str, config: Any) -> torch.Tensor:
    """Computes the advantages (B, T) of rows by verl's own estimator over rollouts.

    ``data`` has ``token_level_rewards`` and ``response_mask`` (B, T), and ``uid`` (B,), the group; ``estimator`` is one
    of ``OF_GROUPS``, and ``config`` verl's ``algorithm`` section.
    """
    last_R, owner_B = last_rows(keys, data.batch["response_mask"].any(-1).tolist())
    chosen = compute_advantage(data.select_idxs(last_R), adv_estimator=estimator, config=config)
    first_R = chosen.batch["response_mask"].argmax(dim=1)
    advantage_R = chosen.batch["advantages"][torch.arange(len(last_R)), first_R]
    advantages_BT: torch.Tensor = advantage_R[owner_B].unsqueeze(-1) * data.batch["response_mask"]
    return advantages_BT


def call_advantages(
    credit_B: Sequence[Sequence[CallCredit]],
    rewards_B: Sequence[float],
    groups_B: Sequence[str],
    keys: Sequence[str],
    mask_BT: torch.Tensor,
    estimator: Estimator,
) -> torch.Tensor:
    """Computes the advantages (B, T) of calls whose rewards a credit rule assigned; the results equal ``grpo``'s.

    Args:
        credit_B: the calls of each row; a row without calls stands for a rollout with nothing to train on.
        rewards_B: the reward of each row's rollout.
        groups_B: the group of each row.
        keys: as for :func:`last_rows`.
        mask_BT: 1 on sampled tokens.
        estimator: a value of ``CREDIT_ESTIMATORS``, or ``dr_grpo``.
    """
    rollouts = [key.rpartition("_")[0] for key in keys]
    places = [(row, call) for row, calls in enumerate(credit_B) for call in calls]
    items = [Scored(call.value, groups_B[row], rollouts[row], call.turn, call.end - call.start) for row, call in places]
    by_turn = {item.group for item in items if item.turn is not None}
    empty = [
        Scored(rewards_B[row], groups_B[row], rollouts[row])
        for row, calls in enumerate(credit_B)
        if not calls and groups_B[row] not in by_turn
    ]
    advantages_BT = torch.zeros(mask_BT.shape)
    for (row, call), advantage in zip(places, compute_advantages([*items, *empty], estimator), strict=False):
        advantages_BT[row, call.start : call.end] = advantage
    return advantages_BT * mask_BT
