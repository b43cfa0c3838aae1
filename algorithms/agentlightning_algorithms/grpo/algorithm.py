"""``grpo``: trains a model's weights on one machine, by group-relative policy optimisation.

    loop:  publish weights -> roll out groups of the same task -> advantages within each group -> update

Shao et al. 2024, DeepSeekMath, arXiv:2402.03300. Sampling happens in a policy server, a process of its own; agents
reach it through the gateway, which records tokens and log-probabilities. ``session.py`` holds the parts of a run
together; this file has the settings and the order of things.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.grpo.learning.advantage import Estimator
from agentlightning_algorithms.grpo.learning.experience import RowKind, Selection
from agentlightning_algorithms.grpo.learning.setting import LoraSettings, UpdateSettings, check_sampling
from agentlightning_algorithms.grpo.model.checkpoint import atomic_directory, recover_directory
from agentlightning_algorithms.grpo.session import Batch, Session, SessionSettings, open_session

logger = logging.getLogger("agentlightning")


class GRPO(Algorithm):
    """Group-relative policy optimisation of the model behind the resource ``llm``.

    Each step samples ``rollouts_per_task`` rollouts of ``tasks_per_step`` tasks from the newest weights, then updates
    the weights once. Every model call of a rollout is one row, or joins one, and gets the rollout's advantage.
    Rollouts that fail count as ``failed_reward`` and never stop the run.
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
        lora: LoraSettings | None = None,
        backend: str | Mapping[str, Any] = "transformers",
        rows: RowKind = "transitions",
        estimator: Estimator = "grpo",
        failed_reward: float | None = 0.0,
        keep_flat_groups: bool = False,
        refill_rounds: int = 0,
        drop_cut_off: bool = False,
        staleness: Literal[0, 1] = 0,
        success_threshold: float = 1.0,
        rollout_timeout_s: float = 300.0,
        eval_every: int = 10,
        eval_sampling: Mapping[str, Any] | None = None,
        target_reward: float | None = None,
        test_dataset: Sequence[Any] | None = None,
        checkpoint_every: int = 1,
        resource_name: str = "llm",
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "cpu",
        train_threads: int | None = None,
        sample_threads: int = 1,
        max_batch_size: int = 64,
        seed: int | None = None,
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
            lora: train low-rank additions; None: all weights.
            backend: where agents' calls are sampled: ``transformers``, a process that this starts; ``vllm``, a server
                that runs already; or ``{"name": ..., **settings}``.
            rows: ``transitions``: one row per model call. ``trajectories``: calls whose tokens go on from each other
                are one row.
            estimator: the formula of the advantages.
            failed_reward: what a failed rollout counts as; None leaves it out.
            keep_flat_groups: train on groups whose rollouts all earned the same, too.
            refill_rounds: how many times a step draws further tasks in the place of groups without spread (dynamic
                sampling, DAPO, arXiv:2503.14476).
            drop_cut_off: do not train on answers that ended at ``max_tokens``; they count in their group.
            staleness: 0: sampling and training take turns. 1: the next step's rollouts run while this step trains, so
                they are one update old.
            success_threshold: a reward of at least this is a success.
            rollout_timeout_s: seconds after which a rollout is stopped and counts as failed.
            eval_every: steps between two evaluations on the validation set; 0 for none but the first and the last.
            eval_sampling: parameters in evaluation; default greedy: ``{"temperature": 0.0}``.
            target_reward: stop once the mean validation reward reaches this.
            test_dataset: evaluated before the first and after the last step, never used to choose anything.
            checkpoint_every: steps between two checkpoints in the run's directory.
            resource_name: of the resource that agents are given.
            dtype: of computing, when sampling and when training. Trained weights are kept in float32 either way: an
                update is smaller than what bfloat16 can tell apart.
            device: where both sampling and training run.
            train_threads: of torch in the trainer; default is torch's own.
            sample_threads: of torch in the policy server.
            max_batch_size: calls that the policy server samples at once.
            seed: of task order, sampling and minibatches; default is the run's.

        Raises:
            ConfigError: a number or a combination that makes no sense, an unknown key of ``sampling``, or a ``model``
                that is a path where no model is.
        """
        for name, value, least in (
            ("steps", steps, 1),
            ("tasks_per_step", tasks_per_step, 1),
            ("checkpoint_every", checkpoint_every, 1),
            ("eval_every", eval_every, 0),
            ("refill_rounds", refill_rounds, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} = {value}: at least {least} is needed")
        if rollouts_per_task < 2:
            raise ConfigError(f"rollouts_per_task = {rollouts_per_task}: a group needs at least 2 to compare")
        if staleness not in (0, 1):
            raise ConfigError(f"staleness = {staleness}: 0 (synchronous) or 1 (one step off) is allowed")
        _check_model(model)
        self.model = model
        self.steps = steps
        self.tasks_per_step = tasks_per_step
        self.sampling = {"temperature": 1.0, **(sampling or {})}
        self.eval_sampling = {**(sampling or {}), "temperature": 0.0, **(eval_sampling or {})}
        check_sampling("sampling", self.sampling)
        check_sampling("eval_sampling", self.eval_sampling)
        update = update or UpdateSettings()
        if staleness and update.old_logprobs == "trainer" and update.importance_weights is None:
            raise ConfigError(
                "staleness = 1 with old_logprobs = 'trainer': nothing corrects for the older weights that sampled; set "
                "update.importance_weights, or old_logprobs: sampler, whose ratio does"
            )
        self.update = replace(
            update,
            temperature=float(self.sampling["temperature"]),
            total_updates=update.total_updates or steps,
        )
        self.selection = Selection(
            rows=rows,
            estimator=estimator,
            failed_reward=failed_reward,
            keep_flat_groups=keep_flat_groups,
            drop_cut_off=drop_cut_off,
        )
        self.settings = SessionSettings(
            model=model,
            lora=lora,
            backend=backend,
            sampling=self.sampling,
            eval_sampling=self.eval_sampling,
            tasks_per_step=tasks_per_step,
            rollouts_per_task=rollouts_per_task,
            refill_rounds=refill_rounds,
            rollout_timeout_s=rollout_timeout_s,
            success_threshold=success_threshold,
            resource_name=resource_name,
            dtype=dtype,
            device=device,
            train_threads=train_threads,
            sample_threads=sample_threads,
            max_batch_size=max_batch_size,
        )
        self.seed = seed
        self.staleness = staleness
        self.eval_every = eval_every
        self.target_reward = target_reward
        self.test_dataset = test_dataset
        self.checkpoint_every = checkpoint_every
        self._session: Session | None = None
        self._resuming = False
        self._resume_from: Path | None = None

    def save_state(self, directory: Path) -> None:
        """Writes ``directory/checkpoint``: weights, optimizer, random state, step, data position; whole or not at all.

        It can be read at any time, by ``load_state`` of this algorithm and, as a model, by ``from_pretrained``.
        """
        if self._session is not None:
            self._session.updater.save(directory / "checkpoint", self._session.state())

    def load_state(self, directory: Path) -> None:
        """Continues from ``directory/checkpoint`` when ``run`` begins; a run killed before its first starts over."""
        self._resuming = True
        checkpoint = recover_directory(directory / "checkpoint")
        if checkpoint.is_dir():
            self._resume_from = checkpoint
        else:
            logger.warning("%s holds no checkpoint yet; the training starts from the beginning", directory)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains until ``steps`` or ``target_reward`` is reached."""
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("grpo needs a train_dataset with at least one task")
        seed = self.context.seed if self.seed is None else self.seed
        settings, update = replace(self.settings, seed=seed), replace(self.update, seed=seed)
        async with contextlib.AsyncExitStack() as stack:
            self._session = await open_session(
                stack, self.context, self.get_adapter(), settings, update, self._resume_from
            )
            self._session.resumed = self._resuming
            try:
                await self._train(self._session, train_dataset, val_dataset)
            finally:
                self._session = None

    async def _train(self, session: Session, train: Dataset[Any], val: Dataset[Any] | None) -> None:
        started_at = session.step
        await session.publish()
        reached = False
        if session.step == 0:
            metrics = {**await self._evaluate(session, val, "val"), **await self._test(session)}
            await session.report(metrics)
        elif self.target_reward is not None:  # resumed: the run may have been stopped after it had reached its target
            reached = self._reached(await self._evaluate(session, val, "val"))
        coming: asyncio.Task[Batch] | None = None
        try:
            while session.step < self.steps and not reached:
                started = time.monotonic()
                batch = await (coming or session.collect(train, session.step, session.position))
                waited_s = time.monotonic() - started
                coming = None
                if self.staleness and session.step + 1 < self.steps:
                    coming = asyncio.create_task(session.collect(train, session.step + 1, batch.position))
                metrics = await session.learn(batch, self.selection, self.staleness)
                if coming is not None:
                    await asyncio.wait([coming])  # whose rollouts all keep to one version of the weights
                published = time.monotonic()
                await session.publish()
                now = time.monotonic()
                metrics |= {"wait_s": waited_s, "publish_s": now - published, "seconds": now - started}
                last = session.step == self.steps
                if last or (self.eval_every and session.step % self.eval_every == 0):
                    metrics |= await self._evaluate(session, val, "val")
                    reached = self._reached(metrics)
                if last or reached:
                    metrics |= await self._test(session)
                metrics["progress"] = 1.0 if reached else (session.step - started_at) / (self.steps - started_at)
                await session.report(metrics)
                if last or reached or session.step % self.checkpoint_every == 0:
                    await self._checkpoint()
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def _checkpoint(self) -> None:
        if self.context.directory is not None:
            await asyncio.to_thread(self.save_state, self.context.directory)

    def _reached(self, metrics: Mapping[str, float]) -> bool:
        return self.target_reward is not None and metrics.get("val_reward", -math.inf) >= self.target_reward

    async def _evaluate(self, session: Session, dataset: Dataset[Any] | None, mode: RolloutMode) -> dict[str, float]:
        """Measures the newest weights; the best on the validation set are kept in ``best``."""
        if dataset is None or not len(dataset):
            return {}
        metrics = await session.evaluate(dataset, mode)
        reward = metrics[f"{mode}_reward"]
        if mode == "val" and (session.best_reward is None or reward > session.best_reward):
            session.best_reward = reward
            if self.context.directory is not None:
                await asyncio.to_thread(_save_best, session, self.context.directory)
        return metrics

    async def _test(self, session: Session) -> dict[str, float]:
        return await self._evaluate(session, self.test_dataset, "test")


def _save_best(session: Session, directory: Path) -> None:
    with atomic_directory(directory / "best") as scratch:
        session.updater.policy.save_trained(scratch)


def _check_model(model: str) -> None:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model = {model!r}: that directory has no config.json; give one that save_pretrained wrote"
            )
    elif path.is_absolute() or model.startswith((".", "~")) or path.exists():
        raise ConfigError(f"model = {model!r}: there is no such directory; give one, or the name of a model on the hub")
