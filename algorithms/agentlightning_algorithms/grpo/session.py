"""A running ``grpo`` training: connects the store, the gateway, the policy backend and the updater."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, RunContext
from agentlightning.plugin.registry import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutConfig, RolloutMode, Triplet
from agentlightning_algorithms.grpo.choice import pass_at_k
from agentlightning_algorithms.grpo.learning.episode import Episode, count_staleness, describe_episodes, gather_episodes
from agentlightning_algorithms.grpo.learning.experience import (
    build_experience,
    find_flat_groups,
    score_episodes,
)
from agentlightning_algorithms.grpo.learning.monitor import TrainingMonitor
from agentlightning_algorithms.grpo.learning.record import training_spans
from agentlightning_algorithms.grpo.learning.updater import Updater
from agentlightning_algorithms.grpo.model.checkpoint import atomic_directory
from agentlightning_algorithms.grpo.setting import GRPOSettings, agent_sampling
from agentlightning_algorithms.grpo.training_row import TrainingRow
from agentlightning_algorithms.policy_backend import PolicyBackend, publish_weights
from agentlightning_algorithms.rollout_result import RewardCheck
from agentlightning_plugins.training_records.record import LEDGER_SPAN, LedgerEntry

logger = logging.getLogger("agentlightning")

MODEL_NAMES = {"train": "policy", "eval": "policy-val"}
"""Names under which agents call the trained model: the gateway forces other sampling parameters on each."""
_BACKEND_CHECK_S = 2.0
_KEPT_STEPS = 4
"""Of a store that is lost with its process."""
_EVALUATED = ("reward", "success_rate", "failure_rate")
"""Metrics of evaluations, beside those by name."""
_EVALUATED_BY_NAME = ("reward/", "rewards/", "pass@")


@dataclass(frozen=True)
class Batch:
    """The finished rollouts of one step."""

    episodes: list[Episode]
    version: int
    """Version of the weights that sampled them."""
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
    updater: Updater
    directory: Path
    monitor: TrainingMonitor
    step: int = 0
    """Updates made so far; also the version of the weights."""
    position: int = 0
    """Tasks drawn from the training set by the steps made so far."""
    best_reward: float | None = None
    """On the validation set."""
    resumed: bool = False
    reward_check: RewardCheck = field(default_factory=RewardCheck)
    train_resources: str = ""
    eval_resources: str = ""
    sampler_totals: Mapping[str, float] = field(default_factory=dict)
    task_rewards: dict[int, float] = field(default_factory=dict)
    """Newest mean reward of each task of the training set, by index."""
    rollout_ids: dict[int, list[str]] = field(default_factory=dict)
    """Rollouts that have not been deleted, by step."""
    opened_at: float = 0.0
    """When this process first published the model."""

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the updater's state."""
        own = {"step": self.step, "position": self.position, "best_reward": self.best_reward}
        return {**own, "watch": self.monitor.state(), "task_rewards": self.task_rewards}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self.step, self.position, self.best_reward = state["step"], state["position"], state["best_reward"]
        self.monitor.restore(state["watch"])
        self.task_rewards = dict(state.get("task_rewards", {}))
        self.reward_check.is_passed = self.step > 0

    async def publish(self) -> None:
        """Puts the newest weights into the policy backend, and publishes the resources that refer to them.

        Resource ids are a function of run and step. A resumed run publishes them again with the model's new address,
        for the rollouts that were left in the queue.
        """
        path = self.directory / "weights" / f"{self.step % 2}"
        await asyncio.to_thread(self.updater.policy.save, path)
        await publish_weights(self.backend, self.gateway, path, self.step)
        self.eval_resources = await self._publish_resources("eval", self.settings.eval_sampling or {})
        self.train_resources = await self._publish_resources("train", self.settings.sampling or {})
        self.opened_at = self.opened_at or time.time()

    async def _publish_resources(self, use: str, sampling: Mapping[str, Any]) -> str:
        resources_id = "rs-" + self.context.rollout_id("resources", use, self.step).removeprefix("ro-")
        llm = self.gateway.as_resource(model=MODEL_NAMES[use], sampling_parameters=agent_sampling(sampling))
        resources = {**(self.context.initial_resources or {}), self.settings.resource_name: llm}
        return (await self.store.update_resources(resources_id, resources)).resources_id

    async def collect(self, train: Dataset[Any], step: int, position: int, *, first_round: int = 0) -> Batch:
        """Rolls out the tasks of a step from ``position`` on, and further tasks to replace groups without spread.

        Rounds of one step that have the same number have the same rollouts.
        """
        started, version, settings = time.monotonic(), self.step, self.settings
        resources_id = self.train_resources
        episodes: list[Episode] = []
        useful = rounds = 0
        for refill in range(first_round, first_round + settings.refill_rounds + 1):
            wanted = settings.tasks_per_step - useful
            if wanted <= 0:
                break
            rounds = refill - first_round
            tasks = self._choose_tasks(train, wanted, position)
            position += wanted
            requests = [
                EnqueueRolloutRequest(
                    input=task,
                    rollout_id=self.context.rollout_id("train", step, refill, place, repetition),
                    metadata={
                        "step": step,
                        "task_id": index,
                        "group": f"{step}-{refill}-{place}",
                        "repetition": repetition,
                        "seed": self._seed("train", step, refill, place, repetition),
                    },
                )
                for place, (index, task) in enumerate(tasks)
                for repetition in range(settings.rollouts_per_task)
            ]
            found = await self._roll_out(requests, "train", resources_id)
            episodes += found
            scored_R = score_episodes(self.shape(found), settings.failed_reward)
            useful += len({episode.group for episode, _ in scored_R}) - len(find_flat_groups(scored_R))
        self._remember_rewards(episodes)
        metrics = await self._sampler_metrics()
        if settings.refill_rounds:
            metrics["refills"] = float(rounds)
        return Batch(episodes, version, position, time.monotonic() - started, metrics)

    def _choose_tasks(self, train: Dataset[Any], count: int, position: int) -> list[tuple[int, Any]]:
        choose = get_manager().get("task_sampler", self.settings.task_sampler)
        seed = self.updater.settings.seed
        chosen = choose(len(train), count, position, seed=seed, rewards=self.task_rewards)
        return [(index, train[index]) for index in chosen]

    def _remember_rewards(self, episodes: Sequence[Episode]) -> None:
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

    async def _sampler_metrics(self) -> dict[str, float]:
        """Returns what the policy backend counted since the last step, evaluation included."""
        before, self.sampler_totals = self.sampler_totals, await self.backend.statistics()
        return {f"sampler/{name}": total - before.get(name, 0.0) for name, total in self.sampler_totals.items()}

    async def learn(self, batch: Batch) -> dict[str, float]:
        """Updates the weights once and returns the metrics of the step."""
        started = time.monotonic()
        updater = self.updater
        experience = await asyncio.to_thread(
            build_experience,
            self.shape(batch.episodes),
            self.settings,
            max_length=updater.policy.max_length,
            decode=self._decode,
            penalty=self._kl_penalty if updater.reference is not None and updater.settings.kl_in == "reward" else None,
            oldest_version=self.step - self.settings.staleness,
            distribution=self.settings.distribution,
        )
        metrics = await asyncio.to_thread(updater.update, experience.rows)
        self.step, self.position = updater.updates, batch.position
        recorded_from = time.monotonic()
        records = await asyncio.to_thread(
            training_spans,
            experience,
            self.step,
            episodes=batch.episodes,
            uses=updater.uses,
            failed_reward=self.settings.failed_reward,
            decode=self._decode,
        )
        await self.store.add_many_spans(records)
        outcomes = Counter(LedgerEntry.from_span(span).outcome for span in records if span.name == LEDGER_SPAN)
        record_s = time.monotonic() - recorded_from
        await self._delete_old_rollouts()
        tokens = sum(len(triplet.response.get("token_ids") or ()) for e in batch.episodes for triplet in e.triplets)
        train_s = metrics.pop("seconds")
        return {
            **self.describe(batch.episodes),
            **count_staleness(batch.episodes, self.step - 1),
            **batch.metrics,
            **experience.metrics,
            **metrics,
            **({"train_tokens_per_s": metrics["tokens_per_s"]} if "tokens_per_s" in metrics else {}),
            "tokens_per_s": tokens / max(batch.seconds, 1e-9),
            "sampled_tokens": float(tokens),
            "staleness": float(self.step - 1 - batch.version),
            "sample_s": batch.seconds,
            "train_s": train_s,
            "prepare_s": time.monotonic() - started - train_s - record_s,
            "record_s": record_s,
            **{f"outcome/{name}": float(count) for name, count in outcomes.items()},
            **_measure_memory(self.settings.device),
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
            return
        for step in [step for step in self.rollout_ids if step < self.step - keep]:
            if step == 0:
                logger.info("rollouts older than %d steps are deleted from the store; keep_steps: 0 keeps them", keep)
            await self.store.delete_rollouts(self.rollout_ids.pop(step))

    async def evaluate(self, dataset: Dataset[Any] | None, mode: RolloutMode) -> dict[str, float]:
        """Runs every task with the sampling parameters of evaluation; keeps the best in validation as ``best``."""
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
            self.updater.policy.save(scratch, merge=False)

    def _seed(self, *place: object) -> int:
        """Returns the seed that the gateway derives the seeds of a rollout's calls from."""
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
        """Records the metrics of a step and logs the warnings that they give rise to."""
        for warning in self.monitor.observe(metrics) if self.step else ():
            logger.warning("step %d: %s", self.step, warning)
        await self.store.add_metrics(self.step, {**metrics, "warnings": float(self.monitor.active)})

    async def _roll_out(
        self, requests: Sequence[EnqueueRolloutRequest], mode: RolloutMode, resources_id: str
    ) -> list[Episode]:
        config = RolloutConfig(
            timeout_seconds=self.settings.rollout_timeout_s, max_attempts=2, retry_condition=["unresponsive"]
        )
        common = {"mode": mode, "resources_id": resources_id, "config": config}
        requests = [request.model_copy(update=common) for request in requests]
        if mode != "test":
            self.rollout_ids.setdefault(self.step, []).extend(str(request.rollout_id) for request in requests)
        began_before = self.opened_at if self.resumed else None
        gathering = asyncio.create_task(
            gather_episodes(self.store, self.adapter, requests, self.gateway.flush, retry_before=began_before)
        )
        try:
            while not gathering.done():
                self.backend.check()  # agents only see connection errors, and only after retries
                await asyncio.wait([gathering], timeout=_BACKEND_CHECK_S)
        finally:
            gathering.cancel()
        episodes = await gathering
        self.reward_check.add(episode.outcome for episode in episodes)
        return episodes

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.updater.policy.tokenizer.decode(list(ids)))

    def _kl_penalty(self, rows: Sequence[TrainingRow]) -> list[list[float]]:
        coefficient = self.updater.settings.kl_coefficient
        return [[coefficient * value for value in values] for values in self.updater.reference_kl(rows)]


def _measure_memory(device: str) -> dict[str, float]:
    """Returns peak memory in GB: of this process, and of the GPU since the last step."""
    unit = 1 if sys.platform == "darwin" else 1024
    memory = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}
    if device.startswith("cuda"):
        memory["gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
    return memory
