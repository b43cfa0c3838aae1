"""Advantages of rollouts, relative to the other rollouts of the same task.

    R   rollouts of a batch
    G   groups: the rollouts of one task under one snapshot of the weights; n_g of them in group g

A rollout counts once, however many model calls it made: it has one reward and gets one advantage, which the caller
broadcasts to all of its rows. Grouping rows instead would let a rollout with more turns shift its own baseline.
Everything is plain float64; the numbers equal verl 0.9.1's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

from agentlightning_algorithms.grpo.setting import Estimator

Group = TypeVar("Group", bound=Hashable)


class Baseline(NamedTuple):
    """How the rewards of a group become advantages."""

    mean: float
    scale: float

    def advantage(self, reward: float) -> float:
        """Returns ``(reward - mean) * scale``."""
        return (reward - self.mean) * self.scale


def group_baselines(
    rewards_R: Sequence[float],
    groups_R: Sequence[Hashable],
    estimator: Estimator = "grpo",
    *,
    tokens_R: Sequence[int] | None = None,
) -> list[Baseline]:
    """Returns, for each rollout, the baseline of its group.

    - ``grpo``: advantage (r - mean_g) / (std_g + 1e-6), std with n_g - 1 (Shao et al. 2024, DeepSeekMath,
      arXiv:2402.03300, which leaves the divisor of the std open; verl uses n - 1, too).
    - ``dr_grpo``: r - mean_g. Dividing by the std weights tasks by how decided they are (Liu et al. 2025,
      arXiv:2503.20783).
    - ``rloo``: r minus the mean of the other n_g - 1 rewards (Ahmadian et al. 2024, arXiv:2402.14740).
    - ``reinforce_plus_plus_baseline``: r - mean_g, then whitened (mean 0, variance 1 with n - 1) over the tokens of the
      whole batch, so that rare successes are not amplified task by task (Hu et al. 2025, arXiv:2501.03262).
    - ``opo``: r minus the mean of the group weighted by length, the baseline of least variance when a rollout's
      gradient grows with its length (Hao et al. 2025, arXiv:2505.23585).

    A rollout alone in its group cannot be compared. As in verl its advantage is then its own reward (``grpo``: over
    1 + 1e-6), which is plain REINFORCE; :func:`zero_spread_groups` finds such groups.

    Args:
        rewards_R: the final reward of each rollout.
        groups_R: the group each rollout belongs to.
        estimator: the formula.
        tokens_R: how many tokens each rollout sampled, for the last two estimators; None: all count the same.

    Raises:
        ValueError: the sequences differ in length, or a reward is not finite.
    """
    members = group_members(rewards_R, groups_R)
    weight_R = [1.0] * len(rewards_R) if tokens_R is None else [float(max(1, tokens)) for tokens in tokens_R]
    if len(weight_R) != len(rewards_R):
        raise ValueError(f"{len(weight_R)} token counts for {len(rewards_R)} rewards; give one per rollout.")
    baselines_R = [Baseline(0.0, 1.0)] * len(rewards_R)
    for indices in members.values():
        n = len(indices)
        share_R = {i: weight_R[i] if estimator == "opo" else 1.0 for i in indices}
        mean = math.fsum(rewards_R[i] * share_R[i] for i in indices) / math.fsum(share_R.values()) if n > 1 else 0.0
        scale = 1.0
        if estimator == "grpo":
            variance = math.fsum((rewards_R[i] - mean) ** 2 for i in indices) / (n - 1) if n > 1 else 1.0
            scale = 1.0 / (math.sqrt(variance) + 1e-6)
        elif estimator == "rloo" and n > 1:
            scale = n / (n - 1)  # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
        for i in indices:
            baselines_R[i] = Baseline(mean, scale)
    return _whiten(rewards_R, baselines_R, weight_R) if estimator == "reinforce_plus_plus_baseline" else baselines_R


def _whiten(rewards_R: Sequence[float], baselines_R: list[Baseline], weight_R: Sequence[float]) -> list[Baseline]:
    """Normalizes all advantages to mean 0 and variance 1, each counted as often as its rollout has tokens."""
    centered_R = [reward - mean for reward, (mean, _) in zip(rewards_R, baselines_R, strict=True)]
    total = math.fsum(weight_R)
    if total <= 1:
        return baselines_R
    mean = math.fsum(w * c for w, c in zip(weight_R, centered_R, strict=True)) / total
    variance = math.fsum(w * (c - mean) ** 2 for w, c in zip(weight_R, centered_R, strict=True)) / (total - 1)
    scale = 1.0 / math.sqrt(variance + 1e-8)
    return [Baseline(own + mean, scale) for own, _ in baselines_R]


def zero_spread_groups(rewards_R: Sequence[float], groups_R: Sequence[Group]) -> frozenset[Group]:
    """Returns the groups without a learning signal: all rewards are equal, or there is only one rollout.

    DAPO (Yu et al. 2025, arXiv:2503.14476) drops them: they carry no gradient but dilute a token mean.

    Raises:
        ValueError: as :func:`group_baselines`.
    """
    members = group_members(rewards_R, groups_R)
    rewards = {group: [rewards_R[i] for i in indices] for group, indices in members.items()}
    return frozenset(group for group, values in rewards.items() if max(values) - min(values) <= 1e-9)


def group_members(rewards_R: Sequence[float], groups_R: Sequence[Group]) -> dict[Group, list[int]]:
    """Returns the indices of each group's rollouts; checks the rewards."""
    if len(rewards_R) != len(groups_R):
        raise ValueError(f"{len(rewards_R)} rewards for {len(groups_R)} group ids; give one group id per reward.")
    members: dict[Group, list[int]] = {}
    for i, (reward, group) in enumerate(zip(rewards_R, groups_R, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"the reward of rollout {i} (group {group!r}) is {reward}; leave it out or fill it.")
        members.setdefault(group, []).append(i)
    return members
