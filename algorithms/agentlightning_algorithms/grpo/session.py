"""A running ``grpo`` training: connects the store, the gateway, the policy backend and the updater."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, RunContext
from agentlightning.plugin.registry import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutConfig, RolloutMode, Triplet
from agentlightning_algorithms.grpo.choice import pass_at_k
from agentlightning_algorithms.grpo.learning.episode import Episode, count_staleness, describe_episodes, gather_episodes
from agentlightning_algorithms.grpo.learning.experience import find_flat_groups, score_episodes
from agentlightning_algorithms.grpo.learning.metrics import join_metrics, measure_memory
from agentlightning_algorithms.grpo.learning.record import training_spans
from agentlightning_algorithms.grpo.learning.teacher import Teacher
from agentlightning_algorithms.grpo.learning.updater import Updater
from agentlightning_algorithms.grpo.model.checkpoint import atomic_directory
from agentlightning_algorithms.grpo.settings.grpo import GRPOSettings, agent_sampling
from agentlightning_algorithms.grpo.trained_policy import PolicySet, join_experience
from agentlightning_algorithms.policy_backend import PolicyBackend, publish_weights
from agentlightning_algorithms.rollout_result import RewardCheck
from agentlightning_plugins.training_records.record import LEDGER_SPAN, LedgerEntry

logger = logging.getLogger("agentlightning")

BACKEND_CHECK_S = 2.0
_KEPT_STEPS = 4
"""Default of ``keep_steps`` for a store that is lost with its process."""
_EVALUATED = ("reward", "success_rate", "failure_rate")
"""Metrics of evaluations, in addition to those with a prefix of ``_EVALUATED_BY_NAME``."""
_EVALUATED_BY_NAME = ("reward/", "rewards/", "pass@")


@dataclass(frozen=True)
class Batch:
    """The finished rollouts of one step."""

    episodes: list[Episode]
    version: int
    """Oldest version of the weights that sampled the rollouts."""
    position: int
    """Tasks drawn from the training set so far, including these."""
    seconds: float
    metrics: Mapping[str, float]


@dataclass
class Session:
    """State of a training while ``GRPO.run`` runs."""

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
    best_reward: float | None = None
    """Best reward on the validation set so far."""
    reward_check: RewardCheck = field(default_factory=RewardCheck)
    train_resources: str = ""
    eval_resources: str = ""
    sampler_totals: Mapping[str, float] = field(default_factory=dict)
    task_rewards: dict[int, float] = field(default_factory=dict)
    """Newest mean reward of each task of the training set, by index."""
    rollout_ids: dict[int, list[str]] = field(default_factory=dict)
    """Rollouts that have not been deleted, by step."""
    teacher: Teacher | None = None
    published_at: dict[int, float] = field(default_factory=dict)
    """When this process published each version of the weights."""
    addressed_at: dict[str, float] = field(default_factory=dict)
    """When this process first published its address in each of the resources."""
    open_groups: list[tuple[int, int, int]] = field(default_factory=list)
    """Groups of rollouts that no step has used yet: number, index of the task, step in which the group was begun."""

    @property
    def updater(self) -> Updater:
        """The updater of the first policy; all policies have made the same number of updates."""
        return self.policies.first.updater

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the state that a checkpoint stores, by policy name."""
        own = {
            **{name: getattr(self, name) for name in ("step", "position", "best_reward")},
            "task_rewards": dict(self.task_rewards),
            "open_groups": list(self.open_groups),
            "rollout_ids": {step: list(rollout_ids) for step, rollout_ids in self.rollout_ids.items()},
        }
        return {p.name: p.updater.state({**own, "watch": p.monitor.state()}) for p in self.policies}

    def save(self, directory: Path) -> None:
        """Writes a checkpoint, atomically."""
        self.policies.write(directory, self.state())

    def restore(self, directory: Path) -> None:
        """Restores what :meth:`save` wrote; raises a ConfigError if the checkpoint is missing or of other policies."""
        state = self.policies.read(directory)
        self.step, self.position, self.best_reward = state["step"], state["position"], state["best_reward"]
        self.task_rewards = dict(state.get("task_rewards", {}))
        self.open_groups = [tuple(group) for group in state.get("open_groups", ())]
        self.rollout_ids = dict(state.get("rollout_ids", {}))
        self.reward_check.is_passed = self.step > 0

    async def publish(self) -> None:
        """Puts the newest weights into the policy backend, and publishes the resources that refer to them.

        Resource ids are a function of run and step. A resumed run publishes the same ids again with the model's new
        address, for the rollouts that are still queued. If rollouts may outlive their step, the id for training is the
        same in all steps.
        """
        path = self.directory / "weights" / f"{self.step % 2}"
        weights = await asyncio.to_thread(self.policies.publish, path)
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

    async def collect(self, train: Dataset[Any], step: int, position: int, *, first_round: int = 0) -> Batch:
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
            scored_R = score_episodes(self.shape(found), settings.failed_reward)
            useful += len({episode.group for episode, _ in scored_R}) - len(find_flat_groups(scored_R))
        self.remember_rewards(episodes)
        seconds = time.monotonic() - started
        metrics = await self.sampler_metrics()
        if "sampler/busy_s" in metrics:
            busy_s = self.sampler_totals["busy_s"] - busy_before_s
            metrics["sampler/idle_fraction"] = max(0.0, 1.0 - busy_s / seconds)
        if settings.refill_rounds:
            metrics["refills"] = float(rounds)
        return Batch(episodes, version, position, seconds, metrics)

    def group_requests(self, index: int, task: Any, step: int, *place: int) -> list[EnqueueRolloutRequest]:
        """Returns the requests of a group; ``place`` identifies it in the run."""
        group = "-".join(map(str, place))
        return [
            EnqueueRolloutRequest(
                input=task,
                rollout_id=self.context.rollout_id("train", *place, repetition),
                metadata={
                    "step": step,
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
        choose = get_manager().get("task_sampler", self.settings.task_sampler)
        seed = self.updater.settings.seed
        chosen = choose(len(train), count, position, seed=seed, rewards=self.task_rewards)
        return [(index, train[index]) for index in chosen]

    def remember_rewards(self, episodes: Sequence[Episode]) -> None:
        """Keeps the mean reward of each task, for task samplers."""
        rewards: dict[int, list[float]] = {}
        for episode in episodes:
            reward = episode.reward_or(self.settings.failed_reward)
            if reward is not None:
                rewards.setdefault(int((episode.rollout.metadata or {})["task_id"]), []).append(reward)
        self.task_rewards |= {index: sum(values) / len(values) for index, values in rewards.items()}

    def shape(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Returns the episodes to train on, with the rewards to train with."""
        shape = get_manager().get("reward_shaping", self.settings.reward_shaping)
        choose = get_manager().get("rollout_filter", self.settings.rollout_filter)
        kept = choose(episodes, self.settings)
        shaped = [(episode, shape(episode, self.settings)) for episode in kept]
        return [e if reward == e.reward else replace(e, reward=reward) for e, reward in shaped]

    async def sampler_metrics(self) -> dict[str, float]:
        """Returns what the policy backend counted since the last step, evaluation included."""
        before, self.sampler_totals = self.sampler_totals, await self.backend.statistics()
        return {f"sampler/{name}": total - before.get(name, 0.0) for name, total in self.sampler_totals.items()}

    async def learn(self, batch: Batch) -> dict[str, float]:
        """Updates the weights once and returns the metrics of the step."""
        started = time.monotonic()
        episodes, oldest = self.shape(batch.episodes), self.step - self.settings.staleness
        compared = {episode.rollout.rollout_id: episode for episode in episodes}
        removed = [episode for episode in batch.episodes if episode.rollout.rollout_id not in compared]
        metrics: dict[str, float] = {}
        updates, parts = [], []
        for policy in self.policies:
            experience, found = await asyncio.to_thread(policy.learn, episodes, self.settings, self.teacher, oldest)
            parts.append((experience, policy.updater.uses))
            updates.append(found)
            metrics |= {f"{policy.prefix}{name}": value for name, value in found.items() if name != "seconds"}
        joined = join_metrics(updates)
        train_s = joined.pop("seconds")
        self.step, self.position = self.updater.updates, batch.position
        recorded_from = time.monotonic()
        whole, uses = join_experience(parts)
        whole.left_out.update((id(call), "filtered") for episode in removed for call in episode.triplets)
        records = await asyncio.to_thread(
            training_spans,
            whole,
            self.step,
            episodes=[compared.get(episode.rollout.rollout_id, episode) for episode in batch.episodes],
            uses=uses,
            failed_reward=self.settings.failed_reward,
            decode=self.policies.first.decode,
        )
        await self.store.add_many_spans(records)
        outcomes = Counter(LedgerEntry.from_span(span).outcome for span in records if span.name == LEDGER_SPAN)
        record_s = time.monotonic() - recorded_from
        await self._delete_old_rollouts()
        tokens = sum(len(triplet.response.get("token_ids") or ()) for e in batch.episodes for triplet in e.triplets)
        return {
            **joined,
            **self.describe(batch.episodes),
            **count_staleness(batch.episodes, self.step - 1),
            **batch.metrics,
            **metrics,
            "tokens_per_s": tokens / max(batch.seconds, 1e-9),
            "sampled_tokens": float(tokens),
            "staleness": float(self.step - 1 - batch.version),
            "sample_s": batch.seconds,
            "train_s": train_s,
            "prepare_s": time.monotonic() - started - train_s - record_s,
            "record_s": record_s,
            **{f"outcome/{name}": float(count) for name, count in outcomes.items()},
            **measure_memory(self.settings.device),
        }

    async def advance(self, position: int) -> None:
        """Counts an update whose tasks end at ``position``, and deletes rollouts of old steps."""
        self.step, self.position = self.updater.updates, position
        await self._delete_old_rollouts()

    async def _delete_old_rollouts(self) -> None:
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

    async def evaluate(self, dataset: Dataset[Any] | None, mode: RolloutMode) -> dict[str, float]:
        """Evaluates the weights on every task; saves them as ``best`` if the validation reward is the best so far."""
        if dataset is None or not len(dataset):
            return {}
        started = time.monotonic()
        requests = [
            EnqueueRolloutRequest(
                input=dataset[index],
                rollout_id=self.context.rollout_id(mode, self.step, index, *again),
                metadata={"step": self.step, "task_id": index, "seed": self._seed(mode, self.step, index, *again)},
            )
            for index in range(len(dataset))
            for again in [(), *((repetition,) for repetition in range(1, self.settings.eval_rollouts))]
        ]
        episodes = await self._roll_out(requests, mode, self.eval_resources)
        found = self.describe(episodes)
        reward = found.get("reward")  # missing if every rollout failed and failed_reward is None
        if mode == "val" and reward is not None and (self.best_reward is None or reward > self.best_reward):
            self.best_reward = reward
            if self.context.directory is not None:
                await asyncio.to_thread(self._save_best, self.context.directory)
        if self.settings.eval_rollouts > 1:
            found |= pass_at_k(episodes, self.settings.success_threshold)
        kept = {name: found[name] for name in found if name in _EVALUATED or name.startswith(_EVALUATED_BY_NAME)}
        return {**{f"{mode}_{name}": value for name, value in kept.items()}, f"{mode}_s": time.monotonic() - started}

    def _save_best(self, directory: Path) -> None:
        with atomic_directory(directory / "best") as scratch:
            self.policies.save(scratch)

    def _seed(self, *place: object) -> int:
        """Returns the seed from which the gateway derives the seeds of a rollout's calls."""
        digest = hashlib.blake2b("/".join(map(str, (self.updater.settings.seed, *place))).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big") >> 11

    def describe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Returns rewards, lengths and durations of episodes."""
        threshold, failed_reward = self.settings.success_threshold, self.settings.failed_reward
        found = describe_episodes(episodes, success_threshold=threshold, failed_reward=failed_reward)
        for name in self.settings.extra_metrics:
            found |= get_manager().get("training_metrics", name)(episodes)
        return found

    async def report(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step and logs the warnings that they cause."""
        hint = self.policies.first.monitor.idle_hint(metrics)
        if hint is not None:
            logger.info("step %d: %s", self.step, hint)
        for warning in self.policies.observe(metrics) if self.step else ():
            logger.warning("step %d: %s", self.step, warning)
        active = sum(policy.monitor.active for policy in self.policies)
        await self.store.add_metrics(self.step, {**metrics, "warnings": float(active)})

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
