"""Advantages of rollouts and of single model calls, each relative to the items that it is compared with.

    group   the rollouts of one task under one snapshot of the weights
    set     the items of a group that are compared: whole rollouts, or calls of the same turn

Without a credit rule, a rollout has one reward and counts once, however many model calls it made; all its calls get
its advantage. With a credit rule, each call has its own value and is compared with the calls of its set: either the
calls of the same turn in the other rollouts, as in turn-level GRPO (Zeng et al. 2025, arXiv:2505.11821) and in the step
groups of GiGPO (Feng et al. 2025, arXiv:2505.10978), or all calls of the group. Turns are counted separately for each
agent, so that every role has its own baseline (RAE, Liu et al. 2025, arXiv:2506.24119).

Advantages are divided by a standard deviation that is pooled over the sets of a group: it measures how far values are
from the mean of their set. The variance of each set is weighted by its squares, so that sets with little or no spread
do not count: the largest advantages are the same for 1 and for 256 calls, even if only the last call has a reward. A
set whose values are all equal gives 0. Everything is plain float64; for whole rollouts the numbers equal verl 0.9.1's.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from agentlightning.frozen import FrozenDict
from agentlightning.types import Triplet

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo"]
Key = TypeVar("Key", bound=Hashable)

STD_FLOOR = 0.01
"""Lower bound of the standard deviation, so that noise in a nearly flat group is not amplified."""
_SAME = 1e-9


class Scored(NamedTuple):
    """A rollout or a model call with the value that is compared."""

    value: float
    group: Hashable
    rollout: Hashable
    """A rollout counts once in a set, however many of its calls are in the set."""
    turn: Hashable = None
    """Only items of the same turn are compared; items of a group whose turn is None are compared with each other."""
    tokens: int = 1
    """Number of sampled tokens, for the estimators that weight by length."""
    rewards: Mapping[str, float] = FrozenDict()
    """Named rewards of the rollout, for estimators of several rewards."""


def read_credit(triplet: Triplet, reward: float | None, failed_reward: float) -> tuple[float, str | int | None]:
    """Returns the value and the turn of a call; ``reward`` is the reward of its rollout.

    The value is the reward that a credit rule assigned to the call, or else ``reward``. Calls of a rollout that failed
    or reported no reward get ``failed_reward``. Without a credit rule, the turn is None.
    """
    value = triplet.reward if "credit" in triplet.metadata else None
    turn = triplet.metadata.get("turn")
    if reward is None:
        return failed_reward, turn
    return (reward if value is None else value), turn


def compute_advantages(
    items: Sequence[Scored], estimator: Estimator = "grpo", *, std_floor: float = STD_FLOOR
) -> list[float]:
    """Returns the advantage of each item with value v; b is the mean of its set, in which each rollout counts once.

    - ``grpo``: (v - b) / (std + 1e-6), where std is at least ``std_floor`` and its divisor is n - 1 for each set (Shao
      et al. 2024, DeepSeekMath, arXiv:2402.03300, which does not define the divisor; verl uses n - 1, too).
    - ``dr_grpo``: v - b. The std would favour tasks that are too easy or too hard (Liu et al. 2025, arXiv:2503.20783).
    - ``rloo``: v minus the mean of the other n - 1 rollouts (Ahmadian et al. 2024, arXiv:2402.14740).
    - ``reinforce_plus_plus_baseline``: v - b, then whitened (mean 0, variance 1 with n - 1) over the tokens of the
      whole batch, so that rare successes are not amplified task by task (Hu et al. 2025, arXiv:2501.03262).
    - ``opo``: v minus the length-weighted mean, the baseline of least variance if gradients grow with the length
      (Hao et al. 2025, arXiv:2505.23585).

    A call whose set has no other rollout, such as the last call of the longest rollout, is compared with all items of
    its group. The only rollout of a group cannot be compared: as in verl, its advantage is its own value (``grpo``:
    divided by 1 + 1e-6), which is plain REINFORCE; :func:`flat_groups` finds such groups.

    Raises:
        ValueError: a value is not finite.
    """
    sets = _find_sets(items)
    centered = [0.0] * len(items)
    factors = [1.0] * len(items)
    squares: dict[Hashable, float] = defaultdict(float)
    weighted: dict[Hashable, float] = defaultdict(float)
    groups: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.group, []).append(i)
    means = {group: _mean(items, indices, estimator) for group, indices in groups.items()}
    alone = {group for group, indices in groups.items() if len({items[i].rollout for i in indices}) == 1}
    for (group, _), indices in sets.items():
        n = len({items[i].rollout for i in indices})
        baseline = 0.0 if group in alone else _mean(items, indices, estimator) if n > 1 else means[group]
        shares = _shares(items, indices)
        own: dict[Hashable, float] = {}  # the mean of each rollout's items
        for i in indices:
            own[items[i].rollout] = own.get(items[i].rollout, 0.0) + shares[i] * items[i].value
        own_squares = 0.0
        for i in indices:
            centered[i] = items[i].value - baseline
            own_squares += shares[i] * centered[i] ** 2
            if estimator == "rloo" and n > 1:
                centered[i] = items[i].value - (n * baseline - own[items[i].rollout]) / (n - 1)
        squares[group] += own_squares
        weighted[group] += own_squares * own_squares / max(1, n - 1)
    if estimator == "grpo":
        for i, item in enumerate(items):
            variance = weighted[item.group] / squares[item.group] if squares[item.group] else 0.0
            variance = 1.0 if item.group in alone else variance
            factors[i] = 1.0 / (max(std_floor, math.sqrt(variance)) + 1e-6)
    if estimator == "reinforce_plus_plus_baseline":
        return _whiten(centered, [max(1, item.tokens) for item in items])
    return [value * factor for value, factor in zip(centered, factors, strict=True)]


grpo = partial(compute_advantages, estimator="grpo")
dr_grpo = partial(compute_advantages, estimator="dr_grpo")
rloo = partial(compute_advantages, estimator="rloo")
reinforce_plus_plus_baseline = partial(compute_advantages, estimator="reinforce_plus_plus_baseline")
opo = partial(compute_advantages, estimator="opo")


def gdpo(
    items: Sequence[Scored], *, std_floor: float = STD_FLOOR, weights: Mapping[str, float] | None = None
) -> list[float]:
    """The estimator ``gdpo``: the sum of the ``grpo`` advantages of each named reward, whitened over the batch.

    Rewards of different scales then count alike (Liu et al. 2026, arXiv:2601.05242). A rollout without one of the
    rewards counts with the lowest of its group. ``weights`` are by name; None: 1 for each. Without named rewards, only
    the value is normalised.

    Raises:
        ValueError: a weight for a reward that no rollout has, or as :func:`compute_advantages`.
    """
    names = sorted({name for item in items for name in item.rewards})
    if names and (unknown := sorted((weights or {}).keys() - set(names))):
        raise ValueError(f"no rollout has the reward {unknown[0]!r}; they have: {', '.join(names)}")
    total = [0.0] * len(items)
    for name in names or [""]:
        lowest: dict[Hashable, float] = {}
        for item in items:
            if name in item.rewards:
                lowest[item.group] = min(item.rewards[name], lowest.get(item.group, math.inf))
        values = [item.rewards.get(name, lowest.get(item.group, 0.0)) if names else item.value for item in items]
        own = [item._replace(value=value) for item, value in zip(items, values, strict=True)]
        weight = (weights or {}).get(name, 0.0 if weights and names else 1.0)
        for i, value in enumerate(compute_advantages(own, "grpo", std_floor=std_floor)):
            total[i] += weight * value
    return _whiten(total, [max(1, item.tokens) for item in items])


def flat_groups(items: Sequence[Scored]) -> frozenset[Hashable]:
    """Returns the groups without a learning signal: each of their sets has equal values or only one rollout.

    DAPO (Yu et al. 2025, arXiv:2503.14476) drops them: they carry no gradient but dilute a token mean.
    """
    spread = set()
    for (group, _), indices in _find_sets(items).items():
        values = [items[i].value for i in indices]
        if len({items[i].rollout for i in indices}) > 1 and max(values) - min(values) > _SAME:
            spread.add(group)
    return frozenset(item.group for item in items) - spread


def _find_sets(items: Sequence[Scored]) -> dict[tuple[Hashable, Hashable], list[int]]:
    sets: dict[tuple[Hashable, Hashable], list[int]] = {}
    for i, item in enumerate(items):
        if not math.isfinite(item.value):
            raise ValueError(
                f"the reward of rollout {item.rollout} (group {item.group!r}) is {item.value}; rewards must be finite."
            )
        sets.setdefault((item.group, item.turn), []).append(i)
    return sets


def _shares(items: Sequence[Scored], indices: Sequence[int]) -> Mapping[int, float]:
    """Returns a weight for each item such that every rollout counts once."""
    counts = Counter(items[i].rollout for i in indices)
    return {i: 1.0 / counts[items[i].rollout] for i in indices}


def _mean(items: Sequence[Scored], indices: Sequence[int], estimator: Estimator) -> float:
    weights = _shares(items, indices)
    if estimator == "opo":
        weights = {i: float(max(1, items[i].tokens)) for i in indices}
    return statistics.fmean([items[i].value for i in indices], [weights[i] for i in indices])


def _whiten(centered: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Normalizes values to mean 0 and variance 1, weighting each value by the number of tokens of its item."""
    total = sum(weights)
    if total <= 1:
        return list(centered)
    mean = statistics.fmean(centered, weights)
    variance = statistics.fmean([(c - mean) ** 2 for c in centered], weights) * total / (total - 1)
    return [(c - mean) / math.sqrt(variance + 1e-8) for c in centered]
