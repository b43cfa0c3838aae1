"""Advantages of rollouts, relative to the other rollouts of the same task.

    R   rollouts of a batch
    G   groups: the rollouts of one task under one snapshot of the weights; n_g of them in group g

A rollout counts once, however many model calls it made: it has one reward and gets one advantage, which the caller
broadcasts to all of its rows. Grouping rows instead would let a rollout with more turns pull its own baseline.
Everything is plain float64; the numbers equal verl 0.9.1's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, TypeVar

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo"]
Group = TypeVar("Group", bound=Hashable)


class Scale(NamedTuple):
    """How the rewards of a group become advantages: ``(reward - mean) * factor``."""

    mean: float
    factor: float


def group_advantages(
    rewards_R: Sequence[float],
    groups_R: Sequence[Hashable],
    estimator: Estimator = "grpo",
    *,
    epsilon: float = 1e-6,
    tokens_R: Sequence[int] | None = None,
) -> list[float]:
    """Returns one advantage per rollout, in the order given.

    - ``grpo``: (r - mean_g) / (std_g + epsilon), std with n_g - 1 (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300,
      which leaves the divisor of the std open; verl and we take n - 1).
    - ``dr_grpo``: r - mean_g. Dividing by the std weighs tasks by how decided they are (Liu et al. 2025,
      arXiv:2503.20783).
    - ``rloo``: r minus the mean of the other n_g - 1 rewards (Ahmadian et al. 2024, arXiv:2402.14740).
    - ``reinforce_plus_plus_baseline``: r - mean_g, then whitened (mean 0, variance 1 with n - 1) over the tokens of the
      whole batch, so that rare successes are not blown up task by task (Hu et al. 2025, arXiv:2501.03262).
    - ``opo``: r minus the mean of the group weighted by length, the baseline of least variance when a rollout's
      gradient grows with its length (Hao et al. 2025, arXiv:2505.23585).

    A rollout alone in its group has nothing to be compared with. As in verl its advantage is then its own reward
    (``grpo``: over 1 + epsilon), which is plain REINFORCE; :func:`zero_spread_groups` names such groups for a caller
    that drops them.

    Args:
        rewards_R: the final reward of each rollout.
        groups_R: the group each rollout belongs to.
        estimator: the formula.
        epsilon: added to the std, so that a group without spread gets 0 instead of a division by zero.
        tokens_R: how many tokens each rollout sampled, for the last two; None: each counts the same.

    Raises:
        ValueError: the sequences differ in length, or a reward is not finite.
    """
    scales_R = group_scales(rewards_R, groups_R, estimator, epsilon=epsilon, tokens_R=tokens_R)
    return [(reward - mean) * factor for reward, (mean, factor) in zip(rewards_R, scales_R, strict=True)]


def group_scales(
    rewards_R: Sequence[float],
    groups_R: Sequence[Hashable],
    estimator: Estimator = "grpo",
    *,
    epsilon: float = 1e-6,
    tokens_R: Sequence[int] | None = None,
) -> list[Scale]:
    """Returns what turns a reward into an advantage, for the group of each rollout; arguments as `group_advantages`.

    A call with a reward of its own (a credit rule) is put on the scale of its rollout's group: ``(r - mean) * factor``.

    Raises:
        ValueError: as ``group_advantages``.
    """
    members = _members(rewards_R, groups_R)
    weight_R = [1.0] * len(rewards_R) if tokens_R is None else [float(max(1, tokens)) for tokens in tokens_R]
    if len(weight_R) != len(rewards_R):
        raise ValueError(f"{len(weight_R)} token counts for {len(rewards_R)} rewards; give one per rollout.")
    scales_R = [Scale(0.0, 1.0)] * len(rewards_R)
    for indices in members.values():
        n = len(indices)
        share_R = {i: weight_R[i] if estimator == "opo" else 1.0 for i in indices}
        mean = math.fsum(rewards_R[i] * share_R[i] for i in indices) / math.fsum(share_R.values()) if n > 1 else 0.0
        scale = 1.0
        if estimator == "grpo":
            variance = math.fsum((rewards_R[i] - mean) ** 2 for i in indices) / (n - 1) if n > 1 else 1.0
            scale = 1.0 / (math.sqrt(variance) + epsilon)
        elif estimator == "rloo" and n > 1:
            scale = n / (n - 1)  # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
        for i in indices:
            scales_R[i] = Scale(mean, scale)
    return _whiten(rewards_R, scales_R, weight_R) if estimator == "reinforce_plus_plus_baseline" else scales_R


def _whiten(rewards_R: Sequence[float], scales_R: Sequence[Scale], weight_R: Sequence[float]) -> list[Scale]:
    """Makes mean 0 and variance 1 of all advantages, each as often as its rollout has tokens."""
    centered_R = [reward - mean for reward, (mean, _) in zip(rewards_R, scales_R, strict=True)]
    total = math.fsum(weight_R)
    if total <= 1:
        return list(scales_R)
    mean = math.fsum(w * c for w, c in zip(weight_R, centered_R, strict=True)) / total
    variance = math.fsum(w * (c - mean) ** 2 for w, c in zip(weight_R, centered_R, strict=True)) / (total - 1)
    factor = 1.0 / math.sqrt(variance + 1e-8)
    return [Scale(own + mean, factor) for own, _ in scales_R]


def zero_spread_groups(
    rewards_R: Sequence[float], groups_R: Sequence[Group], *, tolerance: float = 1e-9
) -> frozenset[Group]:
    """Returns the groups from which nothing can be learned: all rewards within ``tolerance``, or only one rollout.

    DAPO (Yu et al. 2025, arXiv:2503.14476) drops them: they carry no gradient but dilute a token mean.

    Raises:
        ValueError: the two differ in length, or a reward is not finite.
    """
    flat = set()
    for group, indices in _members(rewards_R, groups_R).items():
        rewards = [rewards_R[i] for i in indices]
        if max(rewards) - min(rewards) <= tolerance:
            flat.add(group)
    return frozenset(flat)


def _members(rewards_R: Sequence[float], groups_R: Sequence[Group]) -> dict[Group, list[int]]:
    if len(rewards_R) != len(groups_R):
        raise ValueError(f"{len(rewards_R)} rewards for {len(groups_R)} group ids; give one group id per reward.")
    members: dict[Group, list[int]] = {}
    for i, (reward, group) in enumerate(zip(rewards_R, groups_R, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"the reward of rollout {i} (group {group!r}) is {reward}; leave it out or fill it.")
        members.setdefault(group, []).append(i)
    return members
