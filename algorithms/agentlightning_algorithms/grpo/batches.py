"""The rollouts of each step of ``grpo``: all of the step's own tasks, or the first complete groups of a pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.types import AttemptedRollout, Dataset
from agentlightning_algorithms.grpo.collector import BACKEND_CHECK_S, RolloutBatch, RolloutCollector
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.experience import find_flat_groups, score_episodes
from agentlightning_algorithms.shared.rollout_result import cancel_rollouts
from agentlightning_plugins.shared.training_records.record import LedgerEntry, Outcome


def make_batches(collector: RolloutCollector, train: Dataset[Any]) -> StepBatches | GroupPool:
    """Returns the batches that the setting ``staleness`` requires."""
    return GroupPool(collector, train) if collector.settings.is_asynchronous else StepBatches(collector, train)


class StepBatches:
    """The rollouts of one step at a time, sampled by one version of the weights; ``staleness`` 0 or 1."""

    def __init__(self, collector: RolloutCollector, train: Dataset[Any]) -> None:
        self._collector = collector
        self._train = train
        self._next: asyncio.Task[RolloutBatch] | None = None
        self._position = collector.position
        self._rounds = 0
        """Rounds of rollouts in the current step, refills included."""

    async def take(self) -> RolloutBatch:
        """Returns the finished rollouts of the next step, or further rollouts of the same step."""
        collector, prefetched = self._collector, self._next
        self._next = None
        batch = await (
            prefetched or collector.collect(self._train, collector.step, self._position, first_round=self._rounds)
        )
        self._position = batch.position
        self._rounds += collector.settings.refill_rounds + 1
        return batch

    async def begin_next(self) -> None:
        """Begins rollouts that run while the batch of this step, if one was taken, is trained on."""
        collector, has_taken = self._collector, self._rounds > 0
        self._rounds = 0
        if has_taken and collector.settings.staleness and collector.step + 1 < collector.settings.steps:
            self._next = asyncio.create_task(collector.collect(self._train, collector.step + 1, self._position))

    async def settle(self) -> None:
        """Waits for the rollouts that must end before the weights change."""
        if self._next is not None:
            await asyncio.wait([self._next])

    async def close(self, *, has_ended: bool) -> None:
        """Stops waiting for rollouts; a pool whose training ``has_ended`` cancels them, too."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)


@dataclass(eq=False)
class _Group:
    """Rollouts of the same task that no step has used yet."""

    number: int
    task: int
    """Index in the training set."""
    step: int
    """Step in which the group was begun."""
    rollout_ids: list[str] = field(default_factory=list)
    gathering: asyncio.Task[list[Episode]] | None = None
    """None for a group that an interrupted run left open, until its rollouts are queued again."""

    @property
    def episodes(self) -> list[Episode] | None:
        """The group's rollouts; None until all of them have ended."""
        return None if self.gathering is None or not self.gathering.done() else self.gathering.result()


class GroupPool:
    """Groups that run while the weights change; ``staleness`` of at least 2.

    With k the staleness and B the tasks of a step, at most (k + 1) B groups are open, so that groups of typical
    duration are at most k updates old when a step uses them (AReaL, arXiv:2505.24298, equation 3). A step uses the
    first B complete groups, the oldest first. Stragglers stay open; groups more than k updates old are dropped.
    """

    def __init__(self, collector: RolloutCollector, train: Dataset[Any]) -> None:
        self._collector = collector
        self._train = train
        self._open = [_Group(*place) for place in collector.open_groups]
        numbers = [group.number for group in self._open]
        self._next_number = max([collector.position - 1, *numbers]) + 1
        self._taken_at: float | None = None

    async def take(self) -> RolloutBatch:
        collector, settings = self._collector, self._collector.settings
        began = self._taken_at or time.monotonic()
        size, remaining = settings.tasks_per_step, settings.steps - collector.step
        spare = settings.refill_rounds * size  # how many groups without spread may be replaced
        taken: list[list[Episode]] = []
        useful = flat = 0
        dropped = await self._drop_stale()
        while True:
            for group in [*self._open]:
                episodes = group.episodes
                if episodes is None or useful == size:
                    continue
                self._open.remove(group)
                if any(episode.rollout.status == "cancelled" for episode in episodes):
                    # Cancelled by the user, or as stale by the interrupted run after its last checkpoint.
                    await self._record([group], "cancelled")
                    dropped += 1
                    continue
                collector.count_rollouts(group.rollout_ids)
                taken.append(episodes)
                scored_R = score_episodes(await collector.shape(episodes), settings.experience.failed_reward)
                is_flat = not scored_R or bool(find_flat_groups(scored_R))
                if is_flat and flat < spare:
                    flat += 1
                else:
                    useful += 1
            if useful == size:
                break
            await self._fill(min(remaining, settings.staleness + 1) * size - useful)
            waiting = [group.gathering for group in self._open if group.gathering is not None]
            collector.backend.check()
            await asyncio.wait(waiting, timeout=BACKEND_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        episodes = [episode for group in taken for episode in group]
        collector.reward_check.add(episode.outcome for episode in episodes)
        collector.remember_rewards(episodes)
        self._taken_at = time.monotonic()
        versions = [version for episode in episodes if (version := episode.oldest_version) is not None]
        metrics = {
            **await collector.sampler_metrics(),
            "groups_open": float(len(self._open)),
            "groups_dropped": float(dropped),
            "calls_of_mixed_versions": float(
                sum(bool(call.metadata.get("weight_versions")) for episode in episodes for call in episode.triplets)
            ),
        }
        if spare:
            metrics["refills"] = float(flat)
        version = min([*versions, collector.step])
        return RolloutBatch(episodes, version, self._next_number, self._taken_at - began, metrics)

    async def begin_next(self) -> None:
        if self._taken_at is None:
            return
        settings = self._collector.settings
        remaining = settings.steps - self._collector.step - 1
        await self._fill(min(remaining, settings.staleness) * settings.tasks_per_step)

    async def settle(self) -> None:
        """Does nothing: running calls go on with the new weights."""

    async def close(self, *, has_ended: bool) -> None:
        await self._stop(self._open, has_ended=has_ended)

    async def _fill(self, size: int) -> None:
        """Begins groups until ``size`` are open, and resumes the groups that an interrupted run left open."""
        collector = self._collector
        count = max(0, size - len(self._open))
        tasks = collector.choose_tasks(self._train, count, self._next_number) if count else []
        self._open += [_Group(self._next_number + i, index, collector.step) for i, (index, _) in enumerate(tasks)]
        self._next_number += count
        for group in self._open:
            if group.gathering is None:
                requests = collector.group_requests(group.task, self._train[group.task], group.step, group.number)
                group.rollout_ids = await collector.enqueue(requests, "train", collector.train_resources)
                group.gathering = asyncio.create_task(collector.gather(group.rollout_ids))
        self._remember_open()

    async def _drop_stale(self) -> int:
        """Drops groups that are too old to train on; returns their number."""
        collector = self._collector
        oldest = collector.step - collector.settings.staleness
        stale = [group for group in self._open if group.gathering is not None and await self._is_stale(group, oldest)]
        if stale:
            self._open = [group for group in self._open if group not in stale]
            await self._stop(stale, has_ended=True)
            await self._record(stale, "stale")
            self._remember_open()
        return len(stale)

    async def _is_stale(self, group: _Group, oldest: int) -> bool:
        """Whether a group has calls sampled by weights older than ``oldest``, or began under such weights."""
        if group.step >= oldest:
            return False
        if group.episodes is not None:
            versions = [version for episode in group.episodes if (version := episode.oldest_version) is not None]
            return bool(versions) and min(versions) < oldest
        # Times at which an earlier process published weights are not known.
        begun_before = min(at for version, at in self._collector.published_at.items() if version >= oldest)
        rollouts = [await self._collector.store.get_rollout_by_id(rollout_id) for rollout_id in group.rollout_ids]
        return any(isinstance(each, AttemptedRollout) and each.attempt.start_time < begun_before for each in rollouts)

    async def _stop(self, groups: Sequence[_Group], *, has_ended: bool) -> None:
        """Stops waiting for groups; if their run ``has_ended``, cancels their rollouts."""
        waiting = [group.gathering for group in groups if group.gathering is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        if has_ended:
            await cancel_rollouts(self._collector.store, [each for group in groups for each in group.rollout_ids])

    async def _record(self, groups: Sequence[_Group], outcome: Outcome) -> None:
        """Records the rollouts of dropped groups in the ledger."""
        collector = self._collector
        for group in groups:
            collector.count_rollouts(group.rollout_ids)
            for rollout_id in group.rollout_ids:
                rollout = await collector.store.get_rollout_by_id(rollout_id)
                if isinstance(rollout, AttemptedRollout):
                    key, attempt_id = str((rollout.metadata or {}).get("group")), rollout.attempt.attempt_id
                    entry = LedgerEntry(rollout_id, attempt_id, collector.step + 1, key, outcome)
                    await collector.store.add_span(entry.to_span())

    def _remember_open(self) -> None:
        self._collector.open_groups = [(group.number, group.task, group.step) for group in self._open]
