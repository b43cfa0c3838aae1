"""Differences between two sets of rewards: of groups of rollouts, such as control and treatment, or of algorithms."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.resources import split_version_id
from agentlightning.reward import count_failed, read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.paging import every
from agentlightning_plugins.shared.statistics.interval import (
    Interval,
    paired_interval,
    paired_p_value,
    reconcile,
    t_p_value,
    t_quantile,
    unpaired_interval,
    unpaired_p_value,
    variance,
)
from agentlightning_plugins.shared.statistics.score import Score

RESOURCES_ID: Final = "resources_id"
_KEY_HASH: Final = "key_hash"
"""Metadata that ``LiveResources.pick(key=...)`` gives to the rollouts of a user."""
_TASK: Final = "task "


@dataclass(frozen=True)
class Group:
    """The rewards of one group; cancelled and unrated rollouts are excluded."""

    name: str
    rewards: Mapping[str, Sequence[float]]
    """By user (``key_hash`` of the metadata), else task, else rollout; the rewards in one list are not independent."""
    failed: int = 0
    """Number of rollouts that failed; they count as in ``Score``, with the rewards of both groups."""
    unrated: int = 0
    """Number of rollouts that succeeded and have no reward yet."""
    unfinished: int = 0
    has_users: bool = False
    """Whether a key assigned users to versions, so that users are compared instead of their rollouts."""

    @property
    def n(self) -> int:
        """Number of rewards."""
        return sum(map(len, self.rewards.values()))

    @property
    def mean(self) -> float:
        """Mean reward over tasks."""
        return statistics.fmean(self.by_task())

    def by_task(self) -> list[float]:
        """Mean reward of each user, task or rollout."""
        return [statistics.fmean(rewards) for rewards in self.rewards.values()]


@dataclass(frozen=True)
class Comparison:
    """The difference between two groups."""

    control: Group
    """The rewards that were compared; if ``paired``, only rewards of common tasks."""
    treatment: Group
    difference: float
    """Mean of the treatment minus mean of the control."""
    low: float
    high: float
    """95 % interval of the difference, which agrees with ``p_value``; infinite if the rewards allow no estimate."""
    p_value: float
    """Two-sided p-value of no difference, by a permutation test."""
    paired: bool
    """Whether tasks that both groups ran were compared one by one."""
    dropped: int = 0
    """Number of tasks that are excluded because only one of two paired groups has a reward for them."""


async def compare_rollouts(
    store: LightningStore, control: str | Mapping[str, Any], treatment: str | Mapping[str, Any]
) -> Comparison:
    """Compares two groups of rollouts of the store's run.

    If both groups share at least half of their tasks, by the ``task_id`` of their metadata, the shared tasks are
    compared one by one. If versions were chosen by user (``LiveResources.pick(key=...)``), users are compared instead.
    The interval and the p-value are valid for a fixed sample: repeating the comparison until it is significant finds
    differences that do not exist.

    Args:
        store: the store of the run.
        control: metadata of the rollouts, as in ``{"group": "control"}``; the key ``resources_id`` selects by the
            rollout's resources. A str is a resources_id, such as ``rs-1@3``, or else the name of a group.
        treatment: the rollouts to compare with the control, in the same form.

    Raises:
        NotFoundError: a group has rewards of fewer than two users, tasks or rollouts.
        ConfigError: the description of a group is empty.
    """
    read = [await _read_group(store, which) for which in (control, treatment)]
    failed = count_failed(reward for _, units in read for rewards in units.values() for reward in rewards)
    groups = [
        replace(group, rewards={unit: [failed if r is None else r for r in own] for unit, own in units.items()})
        for group, units in read
    ]
    for group in groups:
        if len(group.rewards) < 2:
            raise NotFoundError(
                f"{group.name}: {group.n} rollouts with a reward ({group.unrated} without, {group.unfinished} not "
                f"finished), of {len(group.rewards)} users, tasks or independent rollouts; at least 2 are needed"
            )
    return compare_groups(*groups)


def compare_groups(control: Group, treatment: Group) -> Comparison:
    """Compares the rewards of two groups, each with rewards of at least two users, tasks or rollouts."""
    common = {unit for unit in control.rewards if unit in treatment.rewards and unit.startswith(_TASK)}
    has_users = control.has_users or treatment.has_users
    if has_users or 2 * len(common) < max(len(control.rewards), len(treatment.rewards)) or len(common) < 2:
        found = unpaired_difference(treatment.by_task(), control.by_task())
        return Comparison(control, treatment, found.mean, found.low, found.high, found.p_value, paired=False)
    dropped = len(control.rewards.keys() ^ treatment.rewards.keys())
    before, after = (
        replace(group, rewards={task: rewards for task, rewards in group.rewards.items() if task in common})
        for group in (control, treatment)
    )
    found = paired_difference(
        [statistics.fmean(rewards) - statistics.fmean(before.rewards[task]) for task, rewards in after.rewards.items()]
    )
    return Comparison(before, after, found.mean, found.low, found.high, found.p_value, paired=True, dropped=dropped)


async def _read_group(
    store: LightningStore, which: str | Mapping[str, Any]
) -> tuple[Group, dict[str, list[float | None]]]:
    """Returns a group without its rewards, and the rewards by unit, None for a rollout that failed."""
    name = which if isinstance(which, str) else ", ".join(f"{key}={value}" for key, value in which.items())
    if not which:
        raise ConfigError("the description of a group of rollouts is empty; give its name, metadata or resources_id")
    if isinstance(which, str):
        is_resources = await store.get_resources_by_id(which) is not None
        which = {RESOURCES_ID: which} if is_resources else {"group": which}
    metadata = {key: value for key, value in which.items() if key != RESOURCES_ID}
    resources_id = which.get(RESOURCES_ID)
    rewards: dict[str, list[float | None]] = {}
    counts: Counter[str] = Counter()
    has_users = False
    async for rollout in every(store.query_rollouts, metadata=metadata or None):
        ran_with = rollout.resources_id or ""  # a version, which the id of its snapshot names too
        if resources_id is not None and resources_id not in (ran_with, split_version_id(ran_with)[0]):
            continue
        if rollout.status == "cancelled":
            continue
        reward: float | None = None
        if rollout.status == "failed":
            counts["failed"] += 1
        elif rollout.status != "succeeded":
            counts["unfinished"] += 1
        else:
            reward = await read_final_reward(store, rollout)
            counts["unrated"] += reward is None
        if reward is not None or rollout.status == "failed":
            found = rollout.metadata or {}
            unit = rollout.rollout_id
            if found.get(_KEY_HASH) is not None:
                unit, has_users = f"user {found[_KEY_HASH]}", True
            elif found.get("task_id") is not None:
                unit = f"{_TASK}{found['task_id']!r}"
            rewards.setdefault(unit, []).append(reward)
    return Group(name, {}, has_users=has_users, **counts), rewards


@dataclass(frozen=True)
class Difference:
    """A difference of mean rewards. p-value and interval agree: p is at most .05 if the interval excludes 0."""

    mean: float
    low: float
    """Lower end of the 95 % interval; -inf if the rewards allow no estimate."""
    high: float
    p_value: float
    """Two-sided p-value of no difference."""


def paired_difference(differences: Sequence[float]) -> Difference:
    """Estimates the mean of the differences, one per task; at least one is needed."""
    p_value = paired_p_value(differences)
    return _make(statistics.fmean(differences), paired_interval(differences), p_value)


def unpaired_difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Estimates the mean of ``one`` minus the mean of ``other``; the values are independent."""
    p_value = unpaired_p_value(one, other)
    return _make(statistics.fmean(one) - statistics.fmean(other), unpaired_interval(one, other), p_value)


def difference_over_seeds(one: Sequence[Mapping[int, float]], other: Sequence[Mapping[int, float]]) -> Difference:
    """Compares two algorithms that were trained once for each seed and evaluated on the same tasks.

    Tasks are a sample, and so are seeds if there are two or more. The variance is the sum of the variance over tasks
    and the variances over the seeds of each algorithm, with Student's t and the degrees of freedom of Welch and
    Satterthwaite (Satterthwaite 1946, Biometrics Bulletin 2). The result has the larger p-value and the wider interval
    of this method and of the comparison over tasks only.

    Each argument has the mean reward of each task, for each seed; tasks without a reward for every seed are excluded.
    """
    tasks = set.intersection(*({*seed} for seed in (*one, *other)))
    if not tasks:
        raise NotFoundError("the algorithms have no test task with a reward in common")
    by_task = [[statistics.fmean(seed[task] for seed in seeds) for task in sorted(tasks)] for seeds in (one, other)]
    differences = [mine - theirs for mine, theirs in zip(*by_task, strict=True)]
    found = paired_difference(differences)
    error = _combine_errors([differences, _means(one, tasks), _means(other, tasks)])
    if error is None:
        return found
    deviation, freedom = error
    half = t_quantile(freedom) * deviation
    widest = min(found.low, found.mean - half), max(found.high, found.mean + half)
    return _make(found.mean, widest, max(t_p_value(found.mean / deviation, freedom), found.p_value))


def interval_over_seeds(score: Score, seeds: Sequence[Mapping[int, float]]) -> Interval | None:
    """Interval of the mean reward of an algorithm that was trained once for each seed.

    As in ``difference_over_seeds``, tasks and seeds are samples. ``score`` is the score of all seeds together, and
    ``seeds`` the mean reward of each task, for each seed.
    """
    found, tasks = score.interval(), set.intersection(*({*seed} for seed in seeds))
    means = [mean for mean in score.by_task() if mean is not None]
    error = _combine_errors([means, _means(seeds, tasks)]) if tasks else None
    if found is None or error is None:
        return found
    half = t_quantile(error[1]) * error[0]
    low, high = min(found[0], score.mean - half), max(found[1], score.mean + half)
    is_rate = {reward for task in score.rewards for reward in task} <= {0, 1}
    return (max(low, 0.0), min(high, 1.0)) if is_rate else (low, high)


def _means(seeds: Sequence[Mapping[int, float]], tasks: Iterable[int]) -> list[float]:
    return [statistics.fmean(seed[task] for task in tasks) for seed in seeds]


def _combine_errors(samples: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Standard error of a sum of means, and its degrees of freedom; None if a sample has one value, or none varies."""
    parts = [(variance(values) / len(values), len(values) - 1) for values in samples]
    total = sum(part for part, _ in parts)
    if total <= 0 or min(map(len, samples)) < 2:
        return None
    return math.sqrt(total), total**2 / sum(part**2 / count for part, count in parts)


def _make(mean: float, interval: Interval | None, p_value: float) -> Difference:
    low, high = (-math.inf, math.inf) if interval is None else reconcile(interval, p_value, mean)
    return Difference(mean, low, high, p_value)
