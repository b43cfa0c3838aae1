"""``grpo``: trains a model's weights on one machine, by group-relative policy optimisation.

    loop:  publish weights -> roll out groups of the same task -> advantages within each group -> update

Shao et al. 2024, DeepSeekMath, arXiv:2402.03300. Sampling happens in a policy server, a process of its own; agents
reach it through the gateway, which records tokens and log-probabilities; this file joins the parts and keeps the
state.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.algorithm.context import Gateway
from agentlightning.errors import ConfigError
from agentlightning.plugins import get_manager
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutConfig, RolloutMode, Triplet
from agentlightning_algorithms.grpo.advantage import Estimator
from agentlightning_algorithms.grpo.experience import build_experience, gather_episodes, reward_metrics, training_spans
from agentlightning_algorithms.grpo.policy import load_policy
from agentlightning_algorithms.grpo.policy_process import PolicyServer
from agentlightning_algorithms.grpo.setting import UpdateSettings
from agentlightning_algorithms.grpo.updater import Updater

MODEL_NAME = "policy"
"""What agents call the model that is trained."""


class GRPO(Algorithm):
    """Group-relative policy optimisation of the model behind the resource ``llm``.

    Each step samples ``rollouts_per_task`` rollouts of ``tasks_per_step`` tasks from the newest weights, then updates
    the weights once. Every model call of a rollout is one row and gets the rollout's advantage. Rollouts that fail
    count as ``failed_reward`` and never stop the run.
    """

    default_adapter: ClassVar[str | None] = "triplet"

    def __init__(
        self,
        *,
        model: str,
        steps: int = 100,
        tasks_per_step: int = 16,
        rollouts_per_task: int = 8,
        sampling: Mapping[str, Any] | None = None,
        update: UpdateSettings | None = None,
        estimator: Estimator = "grpo",
        failed_reward: float | None = 0.0,
        rollout_timeout_s: float = 300.0,
        eval_every: int = 10,
        eval_sampling: Mapping[str, Any] | None = None,
        target_reward: float | None = None,
        test_dataset: Sequence[Any] | None = None,
        checkpoint_every: int = 1,
        resource_name: str = "llm",
        dtype: str = "float32",
        device: str = "cpu",
        train_threads: int | None = None,
        sample_threads: int = 1,
        max_batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        """Sets up the training; the model is loaded when it runs.

        Args:
            model: directory or hub name of a causal language model with a chat template.
            steps: updates of the weights.
            tasks_per_step: tasks of one step, drawn without repetition until the training set is used up.
            rollouts_per_task: size of a group.
            sampling: parameters agents call the model with in training; default ``{"temperature": 1.0}``.
            update: learning rate, clipping, minibatches and so on. Its schedule spans ``steps``; its temperature and
                seed are those of ``sampling`` and of this run.
            estimator: the formula of the advantages.
            failed_reward: what a failed rollout counts as; None leaves it out.
            rollout_timeout_s: seconds after which a rollout is stopped and counts as failed.
            eval_every: steps between two evaluations on the validation set; 0 for none but the first and the last.
            eval_sampling: parameters in evaluation; default greedy: ``{"temperature": 0.0}``.
            target_reward: stop once the mean validation reward reaches this.
            test_dataset: evaluated before the first and after the last step, never used to choose anything.
            checkpoint_every: steps between two checkpoints in the run's directory.
            resource_name: of the resource that agents are given.
            dtype: of the weights.
            device: where both sampling and training run.
            train_threads: of torch in the trainer; default is torch's own.
            sample_threads: of torch in the policy server.
            max_batch_size: calls that the policy server samples at once.
            seed: of task order, sampling and minibatches.

        Raises:
            ConfigError: a number that makes no sense.
        """
        for name, value, least in (
            ("steps", steps, 0),
            ("tasks_per_step", tasks_per_step, 1),
            ("checkpoint_every", checkpoint_every, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} = {value}: at least {least} is needed")
        if rollouts_per_task < 2:
            raise ConfigError(f"rollouts_per_task = {rollouts_per_task}: a group needs at least 2 to compare")
        self.model = model
        self.steps = steps
        self.tasks_per_step = tasks_per_step
        self.rollouts_per_task = rollouts_per_task
        self.sampling = {"temperature": 1.0, **(sampling or {})}
        self.eval_sampling = {**(sampling or {}), "temperature": 0.0, **(eval_sampling or {})}
        if self.sampling.get("top_p", 1) != 1 or self.sampling.get("top_k", 0) > 0:
            raise ConfigError(
                f"sampling = {dict(self.sampling)}: training needs the whole distribution; leave top_p and top_k out"
            )
        update = update or UpdateSettings()
        self.update = replace(
            update,
            temperature=float(self.sampling["temperature"]),
            total_updates=update.total_updates or max(1, steps),
            seed=seed,
        )
        self.estimator = estimator
        self.failed_reward = failed_reward
        self.rollout_timeout_s = rollout_timeout_s
        self.eval_every = eval_every
        self.target_reward = target_reward
        self.test_dataset = test_dataset
        self.checkpoint_every = checkpoint_every
        self.resource_name = resource_name
        self.dtype = dtype
        self.device = device
        self.train_threads = train_threads
        self.sample_threads = sample_threads
        self.max_batch_size = max_batch_size
        self.seed = seed
        self._session: _Session | None = None
        self._resume_from: Path | None = None

    def save_state(self, directory: Path) -> None:
        """Writes ``directory/checkpoint``: weights, optimizer, random state and the step; it appears when whole."""
        if self._session is not None:
            self._session.updater.save(directory / "checkpoint")

    def load_state(self, directory: Path) -> None:
        """Continues from ``directory/checkpoint`` when ``run`` begins; the weights tell which step it was.

        Raises:
            ConfigError: nothing was saved there.
        """
        if not (directory / "checkpoint").is_dir():
            raise ConfigError(f"{directory} holds no checkpoint to resume from")
        self._resume_from = directory / "checkpoint"

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains until ``steps`` or ``target_reward`` is reached."""
        if self.steps and (train_dataset is None or not len(train_dataset)):
            raise ConfigError("grpo needs a train_dataset with at least one task")
        async with contextlib.AsyncExitStack() as stack:
            session = self._session = await self._open(stack)
            try:
                await self._train(session, train_dataset or [], val_dataset)
            finally:
                self._session = None

    async def _open(self, stack: contextlib.AsyncExitStack) -> _Session:
        store = self.get_store()
        if self.train_threads is not None:
            torch.set_num_threads(self.train_threads)
        directory = self.context.directory
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-grpo-")))
        directory.mkdir(parents=True, exist_ok=True)
        server = PolicyServer(
            self.model,
            log_path=directory / "policy_server.log",
            model_name=MODEL_NAME,
            options={
                "dtype": self.dtype,
                "device": self.device,
                "threads": self.sample_threads,
                "seed": self.seed,
                "max_batch_size": self.max_batch_size,
            },
        )
        stack.push_async_callback(server.stop)
        loading = asyncio.to_thread(load_policy, self.model, dtype=self.dtype, device=self.device)
        policy, _ = await asyncio.gather(loading, server.start())  # both import torch and read the weights
        updater = Updater(policy, self.update)
        if self._resume_from is not None:
            updater.load(self._resume_from)
        gateway = self.get_llm_proxy()
        if gateway is None:
            gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=store))
            await gateway.start()
            stack.push_async_callback(gateway.stop)
        gateway.update_model_list([{"model": MODEL_NAME, "endpoint": server.endpoint}])
        adapter = cast(TraceAdapter[Sequence[Triplet]], self.get_adapter())
        return _Session(store, adapter, gateway, server, updater, directory, step=updater.updates)

    async def _train(self, session: _Session, train: Dataset[Any], val: Dataset[Any] | None) -> None:
        started_at = session.step
        await self._publish(session)
        reached = False
        if session.step == 0:
            await self._report(session, {**await self._evaluate(session, val, "val"), **await self._test(session)})
        elif self.target_reward is not None:  # resumed: the run may have been stopped after it had reached its target
            reached = self._reached(await self._evaluate(session, val, "val"))
        while session.step < self.steps and not reached:
            metrics = await self._step(session, train)
            last = session.step == self.steps
            if last or (self.eval_every and session.step % self.eval_every == 0):
                metrics |= await self._evaluate(session, val, "val")
                reached = self._reached(metrics)
            if last or reached:
                metrics |= await self._test(session)
            metrics["progress"] = 1.0 if reached else (session.step - started_at) / max(1, self.steps - started_at)
            await self._report(session, metrics)
            if self.context.directory is not None and (last or reached or session.step % self.checkpoint_every == 0):
                await asyncio.to_thread(self.save_state, self.context.directory)

    def _reached(self, metrics: Mapping[str, float]) -> bool:
        return self.target_reward is not None and metrics.get("val_reward", -math.inf) >= self.target_reward

    async def _step(self, session: _Session, train: Dataset[Any]) -> dict[str, float]:
        """Rolls out, updates, publishes; the numbers of the step."""
        started = time.monotonic()
        tasks = _draw(train, self.tasks_per_step, session.step, self.seed)
        requests = [
            self._request(session, task, index, "train", session.train_resources, group=position)
            for position, (index, task) in enumerate(tasks)
            for _ in range(self.rollouts_per_task)
        ]
        episodes = await gather_episodes(session.store, session.adapter, requests, session.gateway.flush)
        session.server.check()  # agents only saw connection errors
        sampled = time.monotonic()
        experience = build_experience(
            episodes,
            estimator=self.estimator,
            failed_reward=self.failed_reward,
            max_length=session.updater.policy.max_length,
        )
        metrics = await asyncio.to_thread(session.updater.update, experience.rows)
        trained = time.monotonic()
        session.step = session.updater.updates
        await session.store.add_many_spans(training_spans(experience, session.step))
        await self._publish(session)
        train_s = metrics.pop("seconds")
        tokens = sum(len(triplet.response.get("token_ids") or ()) for e in episodes for triplet in e.triplets)
        return {
            **experience.metrics,
            **metrics,
            "train_tokens_per_s": metrics["tokens_per_s"],
            "tokens_per_s": tokens / max(sampled - started, 1e-9),
            "sampled_tokens": float(tokens),
            "sample_s": sampled - started,
            "train_s": train_s,
            "publish_s": time.monotonic() - trained,
            "seconds": time.monotonic() - started,
        }

    async def _evaluate(self, session: _Session, dataset: Dataset[Any] | None, mode: RolloutMode) -> dict[str, float]:
        if dataset is None or not len(dataset):
            return {}
        started = time.monotonic()
        requests = [
            self._request(session, dataset[index], index, mode, session.eval_resources) for index in range(len(dataset))
        ]
        episodes = await gather_episodes(session.store, session.adapter, requests, session.gateway.flush)
        metrics = reward_metrics(episodes)
        return {f"{mode}_reward": metrics["reward"], f"{mode}_s": time.monotonic() - started}

    async def _test(self, session: _Session) -> dict[str, float]:
        return await self._evaluate(session, self.test_dataset, "test")

    def _request(
        self,
        session: _Session,
        task: Any,
        index: int,
        mode: RolloutMode,
        resources_id: str,
        group: int | None = None,
    ) -> EnqueueRolloutRequest:
        metadata: dict[str, Any] = {"step": session.step, "task_id": index}
        if group is not None:
            metadata["group"] = f"{session.step}-{group}"
        return EnqueueRolloutRequest(
            input=task,
            mode=mode,
            resources_id=resources_id,
            metadata=metadata,
            config=RolloutConfig(
                timeout_seconds=self.rollout_timeout_s, max_attempts=2, retry_condition=["unresponsive"]
            ),
        )

    async def _publish(self, session: _Session) -> None:
        """Makes the newest weights the ones that are sampled from, and the resources that say so the latest."""
        version = session.step
        path = session.directory / "weights" / f"{version % 2}"
        await asyncio.to_thread(session.updater.policy.save, path)
        await session.server.load_weights(path, version)
        resource = session.gateway.as_resource(model=MODEL_NAME, sampling_parameters=self.eval_sampling)
        session.eval_resources = (await session.store.add_resources({self.resource_name: resource})).resources_id
        resource = session.gateway.as_resource(model=MODEL_NAME, sampling_parameters=self.sampling)
        session.train_resources = (await session.store.add_resources({self.resource_name: resource})).resources_id

    async def _report(self, session: _Session, metrics: Mapping[str, float]) -> None:
        await session.store.add_metrics(session.step, metrics)


@dataclass
class _Session:
    """What lives while ``run`` runs."""

    store: LightningStore
    adapter: TraceAdapter[Sequence[Triplet]]
    gateway: Gateway
    server: PolicyServer
    updater: Updater
    directory: Path
    step: int
    """Updates made so far; also the version of the weights."""
    train_resources: str = ""
    eval_resources: str = ""


def _draw(dataset: Dataset[Any], count: int, step: int, seed: int) -> list[tuple[int, Any]]:
    """Picks the tasks of a step: a pure function of the step, so that a resumed run draws what it would have drawn."""
    size = len(dataset)
    orders: dict[int, list[int]] = {}
    chosen = []
    for position in range(step * count, (step + 1) * count):
        epoch, offset = divmod(position, size)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}-{epoch}").sample(range(size), size)
        index = orders[epoch][offset]
        chosen.append((index, dataset[index]))
    return chosen
