"""One run of ``grpo`` while it runs: the policy server, the trainer, and what passes between them and the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, RunContext, serve_models
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutConfig, RolloutMode, Triplet
from agentlightning_algorithms.grpo.learning.advantage import zero_spread_groups
from agentlightning_algorithms.grpo.learning.collapse import CollapseWatch
from agentlightning_algorithms.grpo.learning.episode import Episode, describe_episodes, gather_episodes
from agentlightning_algorithms.grpo.learning.experience import Selection, build_experience, training_spans
from agentlightning_algorithms.grpo.learning.setting import LoraSettings, UpdateSettings
from agentlightning_algorithms.grpo.learning.updater import Updater
from agentlightning_algorithms.grpo.model.policy import load_policy
from agentlightning_algorithms.policy_backend import PolicyBackend, PolicySetup, publish_weights

logger = logging.getLogger("agentlightning")

MODEL_NAME = "policy"
"""What agents call the model that is trained."""
_SERVER_CHECK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """As ``GRPO`` takes them."""

    model: str
    lora: LoraSettings | None
    backend: str | Mapping[str, Any]
    sampling: Mapping[str, Any]
    eval_sampling: Mapping[str, Any]
    tasks_per_step: int
    rollouts_per_task: int
    refill_rounds: int
    rollout_timeout_s: float
    success_threshold: float
    resource_name: str
    dtype: str
    device: str
    train_threads: int | None
    sample_threads: int
    max_batch_size: int
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """The finished rollouts of one step."""

    episodes: list[Episode]
    version: int
    """Updates that the weights had seen when they were sampled."""
    position: int
    """Tasks drawn from the training set so far, these included."""
    seconds: float
    metrics: Mapping[str, float]


@dataclass
class Session:
    """What lives while ``GRPO.run`` runs."""

    settings: SessionSettings
    context: RunContext
    store: LightningStore
    adapter: TraceAdapter[Sequence[Triplet]]
    gateway: Gateway
    backend: PolicyBackend
    updater: Updater
    directory: Path
    step: int = 0
    """Updates made so far; also the version of the weights."""
    position: int = 0
    """Tasks drawn from the training set by the steps made so far."""
    best_reward: float | None = None
    """On the validation set."""
    resumed: bool = False
    watch: CollapseWatch = field(default_factory=CollapseWatch)
    train_resources: str = ""
    eval_resources: str = ""
    sampler_totals: Mapping[str, float] = field(default_factory=dict)
    opened_at: float = 0.0
    """When the model became reachable in this life of the run."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to keep beside the updater's."""
        return {
            "step": self.step,
            "position": self.position,
            "best_reward": self.best_reward,
            "watch": self.watch.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state`` gave."""
        self.step = state["step"]
        self.position = state["position"]
        self.best_reward = state["best_reward"]
        self.watch.restore(state["watch"])

    async def publish(self) -> None:
        """Makes the newest weights the ones that are sampled from, and the resources that say so the latest.

        The ids of the resources follow from run and step. A run that is resumed publishes them once more, with the
        address that the model has now, for the rollouts that were left in the queue.
        """
        version = self.step
        path = self.directory / "weights" / f"{version % 2}"
        await asyncio.to_thread(self.updater.policy.save, path)
        await publish_weights(self.backend, self.gateway, path, version)
        self.eval_resources = await self._publish_resources("eval", self.settings.eval_sampling)
        self.train_resources = await self._publish_resources("train", self.settings.sampling)
        self.opened_at = self.opened_at or time.time()

    async def _publish_resources(self, use: str, sampling: Mapping[str, Any]) -> str:
        resources_id = "rs-" + self.context.rollout_id("resources", use, self.step).removeprefix("ro-")
        llm = self.gateway.as_resource(model=MODEL_NAME, sampling_parameters=sampling)
        resources = {**(self.context.initial_resources or {}), self.settings.resource_name: llm}
        return (await self.store.update_resources(resources_id, resources)).resources_id

    async def collect(self, train: Dataset[Any], step: int, position: int) -> Batch:
        """Rolls out the tasks of a step: from ``position`` on, and more in the place of groups without spread."""
        started, version, settings = time.monotonic(), self.step, self.settings
        resources_id = self.train_resources
        episodes: list[Episode] = []
        useful = rounds = 0
        for refill in range(settings.refill_rounds + 1):
            wanted = settings.tasks_per_step - useful
            if refill and wanted <= 0:
                break
            rounds = refill
            tasks = draw_tasks(train, wanted, position, settings.seed)
            position += wanted
            requests = [
                self._request(
                    task,
                    ("train", step, refill, place, repetition),
                    {"step": step, "task_id": index, "group": f"{step}-{refill}-{place}"},
                    "train",
                    resources_id,
                )
                for place, (index, task) in enumerate(tasks)
                for repetition in range(settings.rollouts_per_task)
            ]
            found = await self._gather(requests)
            episodes += found
            rewards_R, groups_R = [episode.reward or 0.0 for episode in found], [episode.group for episode in found]
            useful += len(set(groups_R)) - len(zero_spread_groups(rewards_R, groups_R))
        metrics = await self._sampler_metrics()
        if settings.refill_rounds:
            metrics["refills"] = float(rounds)
        return Batch(episodes, version, position, time.monotonic() - started, metrics)

    async def _sampler_metrics(self) -> dict[str, float]:
        """What the policy's backend counted since the last step, evaluation included."""
        before, self.sampler_totals = self.sampler_totals, await self.backend.statistics()
        return {f"sampler/{name}": total - before.get(name, 0.0) for name, total in self.sampler_totals.items()}

    async def learn(self, batch: Batch, selection: Selection, staleness: int) -> dict[str, float]:
        """Updates the weights once; the numbers of the step."""
        started = time.monotonic()
        updater = self.updater
        experience = await asyncio.to_thread(
            build_experience,
            batch.episodes,
            selection,
            max_length=updater.policy.max_length,
            decode=lambda ids: str(updater.policy.tokenizer.decode(list(ids))),
            penalty=self._penalize if updater.reference is not None and updater.settings.kl_in == "reward" else None,
            oldest_version=self.step - staleness,
        )
        metrics = await asyncio.to_thread(updater.update, experience.rows)
        self.step, self.position = updater.updates, batch.position
        await self.store.add_many_spans(training_spans(experience, self.step))
        tokens = sum(len(triplet.response.get("token_ids") or ()) for e in batch.episodes for triplet in e.triplets)
        train_s = metrics.pop("seconds")
        return {
            **describe_episodes(batch.episodes, success_threshold=self.settings.success_threshold),
            **batch.metrics,
            **experience.metrics,
            **metrics,
            "train_tokens_per_s": metrics["tokens_per_s"],
            "tokens_per_s": tokens / max(batch.seconds, 1e-9),
            "sampled_tokens": float(tokens),
            "staleness": float(self.step - 1 - batch.version),
            "sample_s": batch.seconds,
            "train_s": train_s,
            "prepare_s": time.monotonic() - started - train_s,
            **_measure_memory(self.settings.device),
        }

    async def evaluate(self, dataset: Dataset[Any], mode: RolloutMode) -> dict[str, float]:
        """Runs every task once with the sampling parameters of evaluation."""
        started = time.monotonic()
        requests = [
            self._request(
                dataset[index],
                (mode, self.step, index),
                {"step": self.step, "task_id": index},
                mode,
                self.eval_resources,
            )
            for index in range(len(dataset))
        ]
        found = describe_episodes(await self._gather(requests), success_threshold=self.settings.success_threshold)
        shown = {name: found[name] for name in found if name == "success" or name.startswith("reward/")}
        return {
            f"{mode}_reward": found["reward"],
            **{f"{mode}_{name}": value for name, value in shown.items()},
            f"{mode}_s": time.monotonic() - started,
        }

    async def report(self, metrics: Mapping[str, float]) -> None:
        """Records the numbers of a step, and says in words when they look bad."""
        for warning in self.watch.observe(metrics) if self.step else ():
            logger.warning("step %d: %s", self.step, warning)
        await self.store.add_metrics(self.step, {**metrics, "warnings": float(self.watch.active)})

    async def _gather(self, requests: Sequence[EnqueueRolloutRequest]) -> list[Episode]:
        began_before = self.opened_at if self.resumed else None
        gathering = asyncio.create_task(
            gather_episodes(self.store, self.adapter, requests, self.gateway.flush, retry_before=began_before)
        )
        try:
            while not gathering.done():
                self.backend.check()  # agents only see connection errors, and only after retries
                await asyncio.wait([gathering], timeout=_SERVER_CHECK_S)
        finally:
            gathering.cancel()
        return await gathering

    def _penalize(self, rows: Sequence[Any]) -> list[list[float]]:
        coefficient = self.updater.settings.kl_coefficient
        return [[coefficient * value for value in values] for values in self.updater.reference_kl(rows)]

    def _request(
        self,
        task: Any,
        place: tuple[str | int, ...],
        metadata: Mapping[str, Any],
        mode: RolloutMode,
        resources_id: str,
    ) -> EnqueueRolloutRequest:
        return EnqueueRolloutRequest(
            input=task,
            mode=mode,
            resources_id=resources_id,
            metadata=dict(metadata),
            rollout_id=self.context.rollout_id(*place),
            config=RolloutConfig(
                timeout_seconds=self.settings.rollout_timeout_s, max_attempts=2, retry_condition=["unresponsive"]
            ),
        )


async def open_session(
    stack: contextlib.AsyncExitStack,
    context: RunContext,
    adapter: TraceAdapter[Sequence[Triplet]],
    settings: SessionSettings,
    update: UpdateSettings,
    resume_from: Path | None,
) -> Session:
    """Starts the policy server, loads the model, and finds the gateway; ``stack`` ends what was started.

    Args:
        stack: of what has to be ended.
        context: of the run.
        adapter: makes triplets.
        settings: of the run.
        update: of the updates.
        resume_from: the checkpoint to continue from.

    Raises:
        ConfigError: no such model, or a checkpoint of another one.
    """
    store = context.store
    if store is None:
        raise ConfigError("grpo has no store; run it through a Trainer")
    if settings.train_threads is not None:
        torch.set_num_threads(settings.train_threads)
    directory = context.directory
    if directory is None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-grpo-")))
    directory.mkdir(parents=True, exist_ok=True)
    backend = cast(PolicyBackend, get_manager().create("policy_backend", settings.backend))
    setup = PolicySetup(
        model=settings.model,
        model_name=MODEL_NAME,
        directory=directory,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.sample_threads,
        max_batch_size=settings.max_batch_size,
        seed=settings.seed,
    )
    stack.push_async_callback(backend.stop)
    # Both import torch and read the weights.
    updater, _ = await asyncio.gather(asyncio.to_thread(_load_updater, settings, update), backend.start(setup))
    gateway = context.llm_proxy
    if gateway is None:
        gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=store))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
    serve_models(gateway, [backend.model_entry])
    session = Session(settings, context, store, adapter, gateway, backend, updater, directory)
    if resume_from is not None:
        session.restore(updater.load(resume_from))
    return session


def _load_updater(settings: SessionSettings, update: UpdateSettings) -> Updater:
    low_precision = settings.dtype != "float32"
    policy = load_policy(
        settings.model, dtype=settings.dtype if settings.lora is not None else "float32", device=settings.device
    )
    if settings.lora is not None:
        from agentlightning_algorithms.grpo.model.lora import add_lora  # peft takes seconds to import

        torch.manual_seed(settings.seed)
        add_lora(policy.model, settings.lora)
    return Updater(policy, update, autocast=low_precision)


def draw_tasks(dataset: Dataset[Any], count: int, position: int, seed: int) -> list[tuple[int, Any]]:
    """Picks tasks by their position in the endless sequence of shuffled epochs: a pure function.

    Returns:
        Index and task.
    """
    size = len(dataset)
    orders: dict[int, list[int]] = {}
    chosen = []
    for place in range(position, position + count):
        epoch, offset = divmod(place, size)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}-{epoch}").sample(range(size), size)
        index = orders[epoch][offset]
        chosen.append((index, dataset[index]))
    return chosen


def _measure_memory(device: str) -> dict[str, float]:
    """Peak memory of this process, and on the GPU since the last step, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    memory = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}
    if device.startswith("cuda"):
        memory["gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
    return memory
