"""Reads the rewards of served rollouts as they arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Rollout, RolloutStatus
from agentlightning_algorithms.shared.live_resources import Result
from agentlightning_algorithms.shared.rollout_result import read_result
from agentlightning_plugins.shared.paging import every

_BATCH_SIZE: Final = 100
_OVERLAP_S: Final = 10.0
"""How far before the last reading rollouts may have started that this reading finds, because clocks differ."""
_MAX_UNRATED: Final = 200
"""Rollouts without a reward that are read again in one round."""
_ENDED: Final[Sequence[RolloutStatus]] = ("succeeded", "failed")
_UNFINISHED: Final[Sequence[RolloutStatus]] = ("queuing", "preparing", "running", "requeuing")


async def read_reward(store: LightningStore, rollout: Rollout, failure_reward: float) -> float | None:
    """The reward of a rollout that has ended: ``failure_reward`` if it failed, None if it has no reward yet."""
    return (await read_result(store, rollout)).reward if rollout.status == "succeeded" else failure_reward


@dataclass
class ResultReader:
    """Reads the results of the rollouts that started in one phase, in certain groups. Each result is returned once.

    The first reward that is read counts. The results of one read are in the order in which their rollouts ended.
    """

    store: LightningStore
    groups: Collection[str]
    """Values of ``group`` in the metadata."""
    since: float
    """Unix time at which the phase began."""
    reward_timeout_s: float
    """Seconds after the end of a rollout in which its reward may arrive."""
    rollout_timeout_s: float
    """Seconds after the start of a rollout after which it counts as failed."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Further metadata of the rollouts."""
    failure_reward: float = 0.0
    """The reward of a rollout that failed."""
    unrated: Counter[str] = field(default_factory=Counter)
    """Rollouts whose reward did not arrive in time, by group."""
    read_at: float = 0.0
    """Time of the last call of ``read_new``, by the store's clock."""
    _n_results: Counter[str] = field(default_factory=Counter)
    """Results so far, by group."""
    _known: set[str] = field(default_factory=set)
    _unfinished: dict[str, Rollout] = field(default_factory=dict)
    _waiting: dict[str, Rollout] = field(default_factory=dict)

    async def read_new(self) -> tuple[list[Result], float]:
        """The results since the last call, without waiting for more, and the horizon.

        The horizon is a Unix time: each rollout that started before it has a result or will not get one.
        """
        last_read_at, self.read_at = self.read_at, self.store.now()  # rollouts that start from now on may be missing
        found = await self._select(_UNFINISHED, self.since)  # first: what ends in between is found twice, not never
        unfinished = {each.rollout_id: each for each in found if each.rollout_id not in self._known}
        gone = sorted(self._unfinished.keys() - unfinished.keys())
        late = {key for key, each in unfinished.items() if self.read_at - each.start_time > self.rollout_timeout_s}
        self._unfinished = {key: each for key, each in unfinished.items() if key not in late}
        ended = await self._select(_ENDED, max(self.since, last_read_at - _OVERLAP_S))
        for start in range(0, len(gone), _BATCH_SIZE):
            ids = gone[start : start + _BATCH_SIZE]
            ended += await self.store.query_rollouts(rollout_id_in=ids, status_in=_ENDED)
        new = {each.rollout_id: each for each in ended if each.rollout_id not in self._known | late}
        self._known |= late | new.keys()
        waiting = list(self._waiting.values())[:_MAX_UNRATED]
        results = [Result(unfinished[key], self.failure_reward) for key in late]
        results += [*await self._read(new.values()), *await self._read(waiting)]
        self._n_results.update(_group(result.rollout) for result in results)
        results.sort(key=lambda result: (result.rollout.end_time or 0.0, result.rollout.rollout_id))
        missing = [*self._unfinished.values(), *self._waiting.values()]
        return results, min([self.read_at, *(rollout.start_time for rollout in missing)])

    def count(self, group: str) -> int:
        """Returns the number of rollouts of a group that have started, as of the last reading."""
        missing = sum(_group(rollout) == group for rollout in (*self._unfinished.values(), *self._waiting.values()))
        return self._n_results[group] + self.unrated[group] + missing

    async def _select(self, statuses: Sequence[RolloutStatus], since: float) -> list[Rollout]:
        return [
            rollout
            for group in self.groups
            async for rollout in every(
                self.store.query_rollouts,
                status_in=statuses,
                metadata={"group": group, **self.where},
                start_after=since,
            )
        ]

    async def _read(self, rollouts: Iterable[Rollout]) -> list[Result]:
        results = []
        for rollout in rollouts:
            self._waiting.pop(rollout.rollout_id, None)  # rollouts still without a reward move to the end
            reward = await read_reward(self.store, rollout, self.failure_reward)
            ended_at = rollout.end_time or rollout.start_time
            if ended_at - rollout.start_time > self.rollout_timeout_s:
                reward = self.failure_reward
            if reward is not None:
                results.append(Result(rollout, reward))
            elif self.store.now() - ended_at < self.reward_timeout_s:
                self._waiting[rollout.rollout_id] = rollout
            else:
                self.unrated[_group(rollout)] += 1
        return results


def _group(rollout: Rollout) -> str:
    return str((rollout.metadata or {}).get("group"))
