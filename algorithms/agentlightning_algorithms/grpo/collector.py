"""Publishes the weights of a training to agents, and rolls out tasks with them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.algorithm import Gateway, RunContext
from agentlightning.errors import ConfigError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutConfig, RolloutMode, Triplet
from agentlightning_algorithms.grpo.episode import Episode, TaskHistory, fill_rewards, gather_episodes
from agentlightning_algorithms.grpo.experience import find_flat_groups, score_episodes
from agentlightning_algorithms.grpo.sampling import FIXED, agent_sampling, distribution
from agentlightning_algorithms.grpo.settings import GRPOSettings
from agentlightning_algorithms.grpo.trained_policy import PolicySet
from agentlightning_algorithms.shared.policy.settings import load_part
from agentlightning_algorithms.shared.policy_backend import PolicyBackend, publish_weights
from agentlightning_algorithms.shared.rollout_result import RewardCheck

logger = logging.getLogger("agentlightning")

BACKEND_CHECK_S: Final = 2.0
_KEPT_STEPS: Final = 4
"""Default of ``keep_steps`` for a store that is lost with its process."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "stop")
"""Parameters that end an answer: they apply to calls that do not set them."""


@dataclass(frozen=True)
class RolloutBatch:
    """The finished rollouts of one step."""

    episodes: list[Episode]
    version: int
    """Oldest version of the weights that sampled the rollouts."""
    position: int
    """Tasks drawn from the training set so far, including these."""
    seconds: float
    metrics: Mapping[str, float]


@dataclass
class RolloutCollector:
    """Rolls out tasks of a training with the newest weights; counts the steps and the tasks of the training."""

    settings: GRPOSettings
    context: RunContext
    store: LightningStore
    adapter: TraceAdapter[Sequence[Triplet]]
    gateway: Gateway
    backend: PolicyBackend
    policies: PolicySet
    directory: Path
    step: int = 0
    """Updates made so far; also the version of the weights."""
    position: int = 0
    """Tasks drawn from the training set by the steps made so far."""
    reward_check: RewardCheck = field(default_factory=RewardCheck)
    train_resources: str = ""
    eval_resources: str = ""
    sampler_totals: Mapping[str, float] = field(default_factory=dict)
    task_rewards: dict[int, list[float | None]] = field(default_factory=dict)
    """``rewards`` of :class:`TaskHistory`."""
    rollout_ids: dict[int, list[str]] = field(default_factory=dict)
    """Rollouts that have not been deleted, by step."""
    published_at: dict[int, float] = field(default_factory=dict)
    """When this process published each version of the weights."""
    addressed_at: dict[str, float] = field(default_factory=dict)
    """When this process first published its address in each of the resources."""
    open_groups: list[tuple[int, int, int]] = field(default_factory=list)
    """Groups of rollouts that no step has used yet: number, index of the task, step in which the group was begun."""

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores."""
        return {
            "step": self.step,
            "position": self.position,
            "lowest_reward": self.reward_check.lowest,
            "task_rewards": {index: list(rewards) for index, rewards in self.task_rewards.items()},
            "open_groups": list(self.open_groups),
            "rollout_ids": {step: list(rollout_ids) for step, rollout_ids in self.rollout_ids.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.step, self.position = state["step"], state["position"]
        self.task_rewards = dict(state["task_rewards"])
        self.open_groups = [tuple(group) for group in state["open_groups"]]
        self.rollout_ids = dict(state["rollout_ids"])
        self.reward_check.is_passed, self.reward_check.lowest = self.step > 0, state["lowest_reward"]

    async def publish(self) -> None:
        """Puts the newest weights into the policy backend, and publishes the resources that refer to them.

        Resource ids are a function of run and step. A resumed run publishes the same ids again with the model's new
        address, for the rollouts that are still queued. If rollouts may outlive their step, the id for training is the
        same in all steps.
        """
        path = self.directory / "weights" / f"{self.step % 2}"
        weights = await asyncio.to_thread(self.policies.publish, path, self.settings.dtype)
        await publish_weights(self.backend, self.gateway, weights, self.step)
        self.eval_resources = await self._publish_resources("eval", self.settings.eval_sampling or {})
        self.train_resources = await self._publish_resources("train", self.settings.sampling or {})
        self.published_at[self.step] = self.store.now()

    async def _publish_resources(self, use: str, sampling: Mapping[str, Any]) -> str:
        step = "any" if use == "train" and self.settings.is_asynchronous else self.step
        resources_id = "rs-" + self.context.rollout_id("resources", use, step).removeprefix("ro-")
        parameters = agent_sampling(sampling)
        llms = {
            policy.resource_name: self.gateway.as_resource(
                model=policy.model_names[use], sampling_parameters=parameters
            )
            for policy in self.policies
        }
        resources = {**(self.context.initial_resources or {}), **llms}
        await self.store.update_resources(resources_id, resources)
        self.addressed_at.setdefault(resources_id, self.store.now())
        return resources_id

    async def collect(self, train: Dataset[Any], step: int, position: int, *, first_round: int = 0) -> RolloutBatch:
        """Rolls out the tasks of a step from ``position`` on, and further tasks to replace groups without spread.

        Rounds of a step with the same number have the same rollouts.
        """
        started, version, settings = time.monotonic(), self.step, self.settings
        busy_before_s = (await self.backend.statistics()).get("busy_s", 0.0)
        resources_id = self.train_resources
        episodes: list[Episode] = []
        useful = rounds = 0
        for refill in range(first_round, first_round + settings.refill_rounds + 1):
            wanted = settings.tasks_per_step - useful
            if wanted <= 0:
                break
            rounds = refill - first_round
            tasks = self.choose_tasks(train, wanted, position)
            position += wanted
            requests = [
                request
                for place, (index, task) in enumerate(tasks)
                for request in self.group_requests(index, task, step, step, refill, place)
            ]
            found = await self._roll_out(requests, "train", resources_id)
            episodes += found
            scored_R = score_episodes(await self.shape(found), settings.experience.failed_reward)
            useful += len({episode.group for episode, _ in scored_R}) - len(find_flat_groups(scored_R))
        self.remember_rewards(episodes)
        seconds = time.monotonic() - started
        metrics = await self.sampler_metrics()
        if "sampler/busy_s" in metrics:
            busy_s = self.sampler_totals["busy_s"] - busy_before_s
            metrics["sampler/idle_fraction"] = max(0.0, 1.0 - busy_s / seconds)
        if settings.refill_rounds:
            metrics["refills"] = float(rounds)
        return RolloutBatch(episodes, version, position, seconds, metrics)

    def group_requests(self, index: int, task: Any, step: int, *place: int) -> list[EnqueueRolloutRequest]:
        """Returns the requests of a group; ``place`` identifies it in the run.

        The step in their metadata is the one that trains on them, as in metrics and ledger: the first is 1.
        """
        group = "-".join(map(str, place))
        return [
            EnqueueRolloutRequest(
                input=task,
                rollout_id=self.context.rollout_id("train", *place, repetition),
                metadata={
                    "step": step + 1,
                    "task_id": index,
                    "group": group,
                    "repetition": repetition,
                    "seed": self._seed("train", *place, repetition),
                    **({"asynchronous": True} if self.settings.is_asynchronous else {}),
                },
            )
            for repetition in range(self.settings.rollouts_per_task)
        ]

    def choose_tasks(self, train: Dataset[Any], count: int, position: int) -> list[tuple[int, Any]]:
        """Returns the next tasks of the training set, with their indices."""
        spec = self.settings.task_sampler
        seed = self.policies.first.updater.settings.seed
        history = TaskHistory(train, position, self.step, seed, self.task_rewards)
        chosen = load_part("task_sampler", spec)(count, history)
        if len(chosen) != count or not all(0 <= index < len(train) for index in chosen):
            raise ConfigError(
                f"the task_sampler {spec!r} returned {list(chosen)[:8]}; {count} indices from 0 to {len(train) - 1} "
                "are needed"
            )
        return [(index, train[index]) for index in chosen]

    def remember_rewards(self, episodes: Sequence[Episode]) -> None:
        """Keeps the mean reward of each group, for task samplers."""
        groups: dict[tuple[int, str], list[float]] = {}
        filled = fill_rewards(episodes, self.settings.experience.failed_reward)
        for episode, reward in zip(episodes, filled, strict=True):
            own = groups.setdefault((int((episode.rollout.metadata or {})["task_id"]), episode.group), [])
            own += [] if reward is None else [reward]
        for (index, _), values in groups.items():
            self.task_rewards.setdefault(index, []).append(sum(values) / len(values) if values else None)

    async def shape(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Returns the episodes to train on, with the rewards to train with. Groups are shaped at the same time."""
        settings, experience = self.settings, self.settings.experience
        if experience.rollout_filter is not None:
            episodes = load_part("rollout_filter", experience.rollout_filter)(episodes, settings)
        if experience.reward_shaping is None:
            return list(episodes)
        shape = load_part("reward_shaping", experience.reward_shaping)
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            groups.setdefault(episode.group, []).append(episode)

        def shape_group(group: Sequence[Episode]) -> list[Episode]:
            return [replace(episode, reward=shape(episode, group, settings)) for episode in group]

        shaped = await asyncio.gather(*(asyncio.to_thread(shape_group, group) for group in groups.values()))
        by_id = {episode.rollout.rollout_id: episode for group in shaped for episode in group}
        return [by_id[episode.rollout.rollout_id] for episode in episodes]

    async def sampler_metrics(self) -> dict[str, float]:
        """Returns what the policy backend counted since the last step, evaluation included."""
        before, self.sampler_totals = self.sampler_totals, await self.backend.statistics()
        return {f"sampler/{name}": total - before.get(name, 0.0) for name, total in self.sampler_totals.items()}

    async def delete_old_rollouts(self) -> None:
        """Deletes the rollouts of steps that are older than ``keep_steps``."""
        keep = self.settings.keep_steps
        if keep is None:
            keep = 0 if self.store.capabilities["durable"] else _KEPT_STEPS
        if not keep:
            self.rollout_ids.clear()
            return
        for step in [step for step in self.rollout_ids if step < self.step - keep]:
            if step == 0:
                logger.info("rollouts older than %d steps are deleted from the store; keep_steps: 0 keeps them", keep)
            await self.store.delete_rollouts(self.rollout_ids.pop(step))

    async def roll_out_all(self, dataset: Dataset[Any], mode: RolloutMode) -> list[Episode]:
        """Rolls out every task of a dataset ``eval_rollouts`` times, with the sampling parameters of evaluations."""
        requests = [
            EnqueueRolloutRequest(
                input=dataset[index],
                rollout_id=self.context.rollout_id(mode, self.step, index, *again),
                metadata={"step": self.step, "task_id": index, "seed": self._seed(mode, self.step, index, *again)},
            )
            for index in range(len(dataset))
            for again in [(), *((repetition,) for repetition in range(1, self.settings.eval_rollouts))]
        ]
        return await self._roll_out(requests, mode, self.eval_resources)

    def _seed(self, *place: object) -> int:
        """Returns the seed from which the gateway derives the seeds of a rollout's calls."""
        digest = hashlib.blake2b(
            "/".join(map(str, (self.policies.first.updater.settings.seed, *place))).encode(), digest_size=8
        )
        return int.from_bytes(digest.digest(), "big") >> 11

    async def enqueue(
        self, requests: Sequence[EnqueueRolloutRequest], mode: RolloutMode, resources_id: str
    ) -> list[str]:
        """Queues rollouts and returns their ids; rollouts that the store already has are not run again."""
        config = RolloutConfig(
            timeout_seconds=self.settings.rollout_timeout_s, max_attempts=2, retry_condition=["unresponsive"]
        )
        common = {"mode": mode, "resources_id": resources_id, "config": config}
        requests = [request.model_copy(update=common) for request in requests]
        return [rollout.rollout_id for rollout in await self.store.enqueue_many_rollouts(requests)]

    async def gather(self, rollout_ids: Sequence[str]) -> list[Episode]:
        """Waits until rollouts have ended, and reads them.

        What an interrupted run has queued may run before this process has published its address for them, and fail.
        """
        flush, addressed_at = self.gateway.flush, self.addressed_at
        found = await gather_episodes(self.store, self.adapter, rollout_ids, flush, addressed_at=addressed_at)
        return [*self.policies.select(found)]

    def count_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Assigns rollouts to the current step, which decides when they are deleted."""
        self.rollout_ids.setdefault(self.step, []).extend(rollout_ids)

    async def _roll_out(
        self, requests: Sequence[EnqueueRolloutRequest], mode: RolloutMode, resources_id: str
    ) -> list[Episode]:
        if mode != "test":
            self.count_rollouts([str(request.rollout_id) for request in requests])
        rollout_ids = await self.enqueue(requests, mode, resources_id)
        gathering = asyncio.create_task(self.gather(rollout_ids))
        try:
            while not gathering.done():
                self.backend.check()  # agents only see connection errors, and only after retries
                await asyncio.wait([gathering], timeout=BACKEND_CHECK_S)
        finally:
            gathering.cancel()
        episodes = await gathering
        self.reward_check.add(episode.outcome for episode in episodes)
        return episodes


def model_entries(entry: Mapping[str, Any], settings: GRPOSettings, policies: PolicySet) -> list[dict[str, Any]]:
    """Returns the entries of the gateway's model list: each policy for training and for evaluation."""
    entries = []
    for policy in policies:
        served = {"model": policy.name} if policy.name else {}
        for use, sampling in (("train", settings.sampling or {}), ("eval", settings.eval_sampling or {})):
            force = (settings.sampling or {})["force"]
            limits = {name: sampling[name] for name in _LIMITS if name in sampling}
            drawn = distribution(sampling)
            own = {
                "model_name": policy.model_names[use],
                "seed_calls": True,
                "sampling_parameters": drawn if force else {name: drawn[name] for name in FIXED},
                "sampling_defaults": limits if force else {**drawn, **limits},
            }
            entries.append({**entry, **served, **own})
    return entries
