"""The algorithm ``grpo``: trains a model's weights on one machine by group-relative policy optimisation.

    loop:  publish weights -> roll out groups of the same task -> advantages within each group -> update

Shao et al. 2024, DeepSeekMath, arXiv:2402.03300. A policy server in its own process samples the calls; agents reach
this server through the gateway, which records tokens and log-probabilities.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset
from agentlightning_algorithms.grpo.batches import make_batches
from agentlightning_algorithms.grpo.checkpoints.clock import CheckpointClock
from agentlightning_algorithms.grpo.checkpoints.training_files import write_record
from agentlightning_algorithms.grpo.checkpoints.writer import CheckpointWriter
from agentlightning_algorithms.grpo.model.checkpoint import recover_directory
from agentlightning_algorithms.grpo.opening import open_session
from agentlightning_algorithms.grpo.session import Session
from agentlightning_algorithms.grpo.settings.grpo import GRPOSettings

logger = logging.getLogger("agentlightning")


class GRPO(GRPOSettings, Algorithm):
    """Group-relative policy optimisation of the model behind the resource ``llm``.

    Each step samples ``rollouts_per_task`` rollouts of ``tasks_per_step`` tasks from the newest weights, then updates
    the weights once. Every model call of a rollout is one training row, or part of one, and gets the rollout's
    advantage. Rollouts that fail count as ``failed_reward`` and do not stop the run, unless
    all rollouts of the first validation, or of the first two steps, fail or have no reward.

    The arguments are those of :class:`~agentlightning_algorithms.grpo.settings.GRPOSettings`.
    """

    default_adapter: ClassVar[str | None] = "triplet"
    rollouts_at_once: ClassVar[int | None] = 64  # the policy server's running batch

    _session: Session | None = None
    _resume_from: Path | None = None

    def save_state(self, directory: Path) -> None:
        """Writes ``directory/checkpoint`` atomically: weights, optimizer, random state, step and data position.

        The checkpoint can be read at any time: by ``load_state``, or as a model by ``from_pretrained``.
        """
        if self._session is not None:
            self._session.save(directory / "checkpoint")

    def load_state(self, directory: Path) -> None:
        """Makes ``run`` continue from ``directory/checkpoint``, or start over if there is no checkpoint yet."""
        checkpoint = recover_directory(directory / "checkpoint")
        if checkpoint.is_dir():
            self._resume_from = checkpoint
        else:
            logger.warning("%s holds no checkpoint yet; the training starts from the beginning", directory)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains until ``steps`` or ``target_reward`` is reached."""
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("grpo needs a train_dataset with at least one task")
        self._check_credit()
        assert self.update is not None, "set by __post_init__"
        update = replace(self.update, seed=self.context.seed if self.seed is None else self.seed)
        async with contextlib.AsyncExitStack() as stack:
            self._session = await open_session(stack, self.context, self.get_adapter(), self, update, self._resume_from)
            if self.context.directory is not None:
                write_record(self.context.directory, self, train_dataset, val_dataset)
            try:
                await self._train(self._session, train_dataset, val_dataset)
            finally:
                self._session = None

    def _check_credit(self) -> None:
        """Rejects reward shaping that would have no effect because the adapter has a credit rule."""
        if self.reward_shaping != "unchanged" and getattr(self.get_adapter(), "credit", None) is not None:
            raise ConfigError(
                f"reward_shaping = {self.reward_shaping!r} changes the rewards of whole rollouts, but the adapter's "
                "credit rule assigns rewards to single calls; leave one of them out"
            )

    async def _train(self, session: Session, train: Dataset[Any], val: Dataset[Any] | None) -> None:
        await session.publish()
        reached = False
        if session.step == 0:
            metrics = await session.evaluate(val, "val")
            await session.report({**metrics, **await session.evaluate(self.test_dataset, "test")})
        elif self.target_reward is not None:  # the run may have been stopped after it reached its target
            reached = self._reached(await session.evaluate(val, "val"))
        batches, clock = make_batches(session, train), CheckpointClock(self.checkpoint_every)
        writer = self._writer(session)
        has_ended = False
        try:
            while session.step < self.steps and not reached:
                started = time.monotonic()
                batch = await batches.take()
                waited_s = time.monotonic() - started
                await batches.begin_next(batch)
                writing = time.monotonic()
                await writer.wait()  # before the weights change
                checkpoint_wait_s = time.monotonic() - writing
                metrics = await session.learn(batch)
                learned = time.monotonic()
                await batches.settle()
                published = time.monotonic()
                waited_s += published - learned
                await session.publish()
                now = time.monotonic()
                metrics |= {"wait_s": waited_s, "publish_s": now - published, "seconds": now - started}
                last = session.step == self.steps
                if last or (self.eval_every and session.step % self.eval_every == 0):
                    metrics |= await session.evaluate(val, "val")
                    reached = self._reached(metrics)
                if last or reached:
                    metrics |= await session.evaluate(self.test_dataset, "test")
                if writer.seconds is not None:
                    metrics |= {"checkpoint_s": writer.seconds, "checkpoint_wait_s": checkpoint_wait_s}
                metrics["progress"] = 1.0 if reached else session.step / self.steps
                await session.report(metrics)
                is_due = clock.is_due(session.step) or last or reached
                await writer.begin(session.state() if is_due else None, session.step)
            has_ended = True
        finally:
            await batches.close(has_ended=has_ended)
            await writer.wait()

    def _writer(self, session: Session) -> CheckpointWriter:
        keep = {"keep_every": self.keep_weights_every, "keep_last": self.keep_weights_last}
        return CheckpointWriter(session.policies, self.context.directory, **keep)

    def _reached(self, metrics: Mapping[str, float]) -> bool:
        return self.target_reward is not None and metrics.get("val_reward", -math.inf) >= self.target_reward
