"""The algorithm ``grpo``: trains a model's weights on one machine by group-relative policy optimisation.

    loop:  publish weights -> roll out groups of the same task -> advantages within each group -> update

Shao et al. 2024, DeepSeekMath, arXiv:2402.03300. A policy server in its own process samples the calls; agents reach
this server through the gateway, which records tokens and log-probabilities.
"""

from __future__ import annotations

import logging
from collections.abc import Sized
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset
from agentlightning_algorithms.grpo.sampling import agent_sampling
from agentlightning_algorithms.grpo.settings import GRPOSettings
from agentlightning_algorithms.grpo.training_session import TrainingSession
from agentlightning_algorithms.shared.trained_model import TrainingRecord

logger = logging.getLogger("agentlightning")


class GRPO(GRPOSettings, Algorithm):
    """Group-relative policy optimisation of the model behind the resource ``llm``.

    Each step samples ``rollouts_per_task`` rollouts of ``tasks_per_step`` tasks from the newest weights, then updates
    the weights once. Every model call of a rollout is one training row, or part of one, and gets the rollout's
    advantage. Rollouts that fail count as ``failed_reward`` and do not stop the run, unless
    all rollouts of the first validation, or of the first two steps, fail or have no reward.

    The arguments are the fields of :class:`~agentlightning_algorithms.grpo.settings.GRPOSettings`.
    """

    default_adapter: ClassVar[str | None] = "triplet"
    rollouts_at_once: ClassVar[int | None] = 64  # the policy server's running batch

    _session: TrainingSession | None = None
    _resume_from: Path | None = None

    def save_state(self, directory: Path) -> None:
        """Writes weights, which ``from_pretrained`` can load, optimizer, random state, step and data position."""
        if self._session is not None:
            self._session.policies.write(directory, self._session.state())

    def load_state(self, directory: Path) -> None:
        """Makes ``run`` continue from what ``save_state`` wrote."""
        self._resume_from = directory

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains until ``steps`` or ``target_reward`` is reached."""
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("grpo needs a train_dataset with at least one task")
        self._check_credit()
        opening = TrainingSession.open(self.context, self, train_dataset, val_dataset, resume_from=self._resume_from)
        async with opening as session:
            if self.context.directory is not None:
                write_record(self.context.directory, self, train_dataset, val_dataset)
            self._session = session
            try:
                async for _ in session.steps():
                    await session.learn(await session.rollouts())
            finally:
                self._session = None

    def _check_credit(self) -> None:
        """Rejects reward shaping that would have no effect because the adapter has a credit rule."""
        shaping = self.experience.reward_shaping
        if shaping is not None and getattr(self.context.adapter, "credit", None) is not None:
            raise ConfigError(
                f"reward_shaping = {shaping!r} changes the rewards of whole rollouts, but the adapter's "
                "credit rule assigns rewards to single calls; leave one of them out"
            )


def write_record(directory: Path, settings: GRPOSettings, train: Sized, val: Sized | None) -> None:
    """Writes the record of a training, which is read to serve and to describe its model."""
    shown = {field.name: getattr(settings, field.name) for field in fields(GRPOSettings)}
    del shown["test_dataset"]
    TrainingRecord(
        algorithm="grpo",
        base=settings.model,
        resource_name=settings.resource_name,
        sampling=agent_sampling(settings.eval_sampling or {}),
        device=settings.device,
        dtype=settings.dtype,
        train_tasks=len(train),
        val_tasks=0 if val is None else len(val),
        settings=shown,
    ).write(directory)
