"""Compares the rewards of two groups of rollouts, such as a control and a treatment."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.resources import split_version_id
from agentlightning.reward import read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Rollout
from agentlightning_plugins.statistics.significance import mean_interval, paired_p_value, unpaired_p_value

RESOURCES_ID: Final = "resources_id"
_PAGE: Final = 500


@dataclass(frozen=True)
class Group:
    """The rewards of one group. Failed rollouts count as 0; cancelled and unrated ones are left out."""

    name: str
    rewards: Mapping[str, Sequence[float]]
    """By ``task_id`` of the metadata, else by rollout id."""
    failed: int = 0
    unrated: int = 0
    """Rollouts that succeeded without a reward so far."""
    unfinished: int = 0

    @property
    def n(self) -> int:
        """Number of rewards."""
        return sum(map(len, self.rewards.values()))

    @property
    def mean(self) -> float:
        """Mean reward over tasks."""
        return statistics.fmean(self.by_task())

    def by_task(self) -> list[float]:
        """Mean reward of each task: its rollouts are not independent of each other."""
        return [statistics.fmean(rewards) for rewards in self.rewards.values()]


@dataclass(frozen=True)
class Comparison:
    """The difference between two groups."""

    control: Group
    treatment: Group
    difference: float
    """Mean of the treatment minus mean of the control."""
    low: float
    high: float
    """95 % interval of the difference: percentile bootstrap, Efron and Tibshirani 1993, chapter 13."""
    p_value: float
    """Two-sided p-value of no difference: a permutation test (Phipson and Smyth 2010, arXiv:1603.05766)."""
    paired: bool
    """Whether both groups ran the same tasks, which were then compared one by one."""


async def compare_rollouts(
    store: LightningStore, control: str | Mapping[str, Any], treatment: str | Mapping[str, Any]
) -> Comparison:
    """Compares two groups of rollouts of the store's run.

    If both ran the same tasks, by ``task_id`` of their metadata, the test is paired. Interval and p-value are valid for
    a fixed sample: repeating the comparison until it is significant finds differences that do not exist.

    Args:
        store: the store of the run.
        control: metadata of the rollouts, as in ``{"group": "control"}``; the key ``resources_id`` selects by the
            rollout's resources. A str is a resources_id, such as ``rs-1@3``, else the name of a group.
        treatment: the other rollouts, in the same form.

    Raises:
        NotFoundError: a group has fewer than two rollouts with a reward.
        ConfigError: the description of a group is empty.
    """
    groups = [await _read_group(store, which) for which in (control, treatment)]
    for group in groups:
        if group.n < 2:
            raise NotFoundError(
                f"{group.name}: {group.n} rollouts with a reward ({group.unrated} without, {group.unfinished} not "
                "finished); at least 2 are needed"
            )
    return compare_groups(*groups)


def compare_groups(control: Group, treatment: Group) -> Comparison:
    """Compares the rewards of two groups, each with at least two."""
    paired = len(control.rewards) > 1 and control.rewards.keys() == treatment.rewards.keys()
    if paired:
        differences = [
            statistics.fmean(rewards) - statistics.fmean(control.rewards[task])
            for task, rewards in treatment.rewards.items()
        ]
        low, high = mean_interval(differences)
        p_value = paired_p_value(differences)
    else:
        before, after = control.by_task(), treatment.by_task()
        low, high = mean_interval(after, before)
        p_value = unpaired_p_value(after, before)
    return Comparison(control, treatment, treatment.mean - control.mean, low, high, p_value, paired)


async def _read_group(store: LightningStore, which: str | Mapping[str, Any]) -> Group:
    name = which if isinstance(which, str) else ", ".join(f"{key}={value}" for key, value in which.items())
    if not which:
        raise ConfigError("the description of a group of rollouts is empty; give its name, metadata or resources_id")
    if isinstance(which, str):
        is_resources = await store.get_resources_by_id(which) is not None
        which = {RESOURCES_ID: which} if is_resources else {"group": which}
    metadata = {key: value for key, value in which.items() if key != RESOURCES_ID}
    resources_id = which.get(RESOURCES_ID)
    rewards: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    cursor: str | None = None
    while True:
        page = await store.query_rollouts(metadata=metadata or None, limit=_PAGE, cursor=cursor)
        for rollout in page:
            if rollout.status == "cancelled" or (resources_id is not None and not _ran_with(rollout, resources_id)):
                continue
            reward: float | None = None
            if rollout.status == "failed":
                reward = 0.0
                counts["failed"] += 1
            elif rollout.status != "succeeded":
                counts["unfinished"] += 1
            else:
                reward = await read_final_reward(store, rollout)
                counts["unrated"] += reward is None
            if reward is not None:
                task = (rollout.metadata or {}).get("task_id")
                rewards.setdefault(rollout.rollout_id if task is None else f"task {task!r}", []).append(reward)
        cursor = page.cursor
        if cursor is None:
            return Group(name, rewards, **counts)


def _ran_with(rollout: Rollout, resources_id: str) -> bool:
    """Whether a rollout used this version, or any version if the id names none."""
    return rollout.resources_id is not None and resources_id in (
        rollout.resources_id,
        split_version_id(rollout.resources_id)[0],
    )
