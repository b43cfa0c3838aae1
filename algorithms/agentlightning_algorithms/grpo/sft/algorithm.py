"""The algorithm ``sft``: fine-tunes a model's weights on conversations, of good rollouts or of a file."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.types import Dataset
from agentlightning_algorithms.grpo.learning.updater import Updater
from agentlightning_algorithms.grpo.model.checkpoint import recover_directory
from agentlightning_algorithms.grpo.model.policy import load_policy
from agentlightning_algorithms.grpo.setting import LoraSettings, UpdateSettings
from agentlightning_algorithms.grpo.sft.example import make_rows, read_examples
from agentlightning_algorithms.trained_model.checkpoint import find_model
from agentlightning_algorithms.trained_model.record import TrainingRecord

logger = logging.getLogger("agentlightning")


@dataclass(kw_only=True, eq=False, repr=False)
class SFT(Algorithm):
    """Supervised fine-tuning: maximises the likelihood of the assistant's messages in conversations.

    With the rollouts of a run as ``source`` this is rejection sampling, as in RFT (Yuan et al. 2023, arXiv:2308.01825).
    The agent is not run.

    Raises:
        ConfigError: a value out of range, or a ``model`` that is a path without a model.
    """

    default_adapter: ClassVar[str | None] = None

    model: str
    """Directory of a model or of a run that trained one, or a hub name."""
    source: str
    """A .jsonl file in the format of OpenAI's fine-tuning, the directory of a run, or the URL of a store."""
    best_of: int | None = None
    """Rollouts of each task that are learned, those with the highest reward; None: all."""
    min_reward: float | None = None
    """The least reward of a rollout that is learned."""
    epochs: int = 1
    """Passes over the conversations."""
    batch_size: int = 16
    """Messages in an optimizer step."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate to a tenth, by epochs."""
    max_tokens_per_microbatch: int = 8192
    """Bound on memory, padding included."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraSettings | None = None
    """Train low-rank adapters; None: all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation; trained weights stay in float32."""
    device: str = "cpu"
    train_threads: int | None = None
    """Torch threads; None: torch's default."""
    seed: int | None = None
    """Of the order of messages; None: the run's."""

    def __post_init__(self) -> None:
        require_least(1, epochs=self.epochs, batch_size=self.batch_size, best_of=self.best_of or 1)
        self.model = find_model(self.model)
        self._updater: Updater | None = None
        self._resume_from: Path | None = None

    def save_state(self, directory: Path) -> None:
        """Writes ``directory/checkpoint`` atomically: weights, optimizer, random state and number of epochs."""
        if self._updater is not None:
            self._updater.save(directory / "checkpoint")

    def load_state(self, directory: Path) -> None:
        """Makes ``run`` continue from ``directory/checkpoint``, if there is one."""
        checkpoint = recover_directory(directory / "checkpoint")
        self._resume_from = checkpoint if checkpoint.is_dir() else None

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains for ``epochs``; the datasets are not used."""
        examples = await read_examples(self.source, self.min_reward, self.best_of)
        rows = await asyncio.to_thread(self._prepare, examples)
        updater, directory = self._updater, self.context.directory
        assert updater is not None
        if directory is not None:
            self._describe(len(examples)).write(directory)
        while updater.updates < self.epochs:
            found = await asyncio.to_thread(updater.update, rows)
            names = ("loss", "grad_norm", "lr", "rows", "response_tokens", "tokens_per_s", "skipped_steps")
            metrics = {name: found[name] for name in names if name in found}
            metrics |= {"conversations": float(len(examples)), "progress": updater.updates / self.epochs}
            await self.get_store().add_metrics(updater.updates, metrics)
            if directory is not None:
                await asyncio.to_thread(self.save_state, directory)
        self._updater = None

    def _prepare(self, examples: list[Any]) -> list[Any]:
        """Loads the model and the checkpoint, and returns the rows of the conversations."""
        if self.train_threads is not None:
            torch.set_num_threads(self.train_threads)
        policy = load_policy(self.model, dtype="float32" if self.lora is None else self.dtype, device=self.device)
        seed = self.context.seed if self.seed is None else self.seed
        if self.lora is not None:
            from agentlightning_algorithms.grpo.model.lora import add_lora  # peft takes seconds to import

            torch.manual_seed(seed)
            add_lora(policy.model, self.lora)
        rows, too_long = make_rows(policy, examples)
        if too_long:
            logger.warning(
                "%d messages are too long for the model's %d tokens, and left out", too_long, policy.max_length
            )
        if not rows:
            raise ConfigError(f"source = {self.source!r} has no message of an assistant that fits the model")
        update = UpdateSettings(
            objective="cross_entropy",
            lr=self.lr,
            schedule=self.schedule,
            total_updates=self.epochs,
            minibatches=math.ceil(len(rows) / self.batch_size),
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=seed,
        )
        self._updater = Updater(policy, update, autocast=self.dtype != "float32")
        if self._resume_from is not None:
            self._updater.load(self._resume_from)
        return rows

    def _describe(self, examples: int) -> TrainingRecord:
        return TrainingRecord(
            algorithm="sft",
            base=self.model,
            sampling={"temperature": 0.0},
            device=self.device,
            dtype=self.dtype,
            train_tasks=examples,
            settings=asdict(self),
        )
