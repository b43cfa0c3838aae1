"""The algorithm ``sft``: fine-tunes a model's weights on conversations from good rollouts or from a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.store.url import hide_password
from agentlightning_algorithms.grpo.learning.updater import Updater
from agentlightning_algorithms.grpo.model.policy import Policy
from agentlightning_algorithms.grpo.offline.example import make_rows, read_examples
from agentlightning_algorithms.grpo.offline.training import OfflineTraining, mean_metrics
from agentlightning_algorithms.grpo.settings.update import UpdateSettings
from agentlightning_algorithms.grpo.training_row import TrainingRow
from agentlightning_plugins.chat_history.fine_tuning import FineTuningExample


@dataclass(kw_only=True, eq=False, repr=False)
class SFT(OfflineTraining):
    """Supervised fine-tuning: maximises the likelihood of the assistant's messages in conversations.

    With the rollouts of a run as ``source`` this is rejection sampling, as in RFT (Yuan et al. 2023, arXiv:2308.01825).
    The agent is not run.

    Raises:
        ConfigError: a value out of range, or a ``model`` that is a path without a model.
    """

    name: ClassVar[str] = "sft"

    best_of: int | None = None
    """Number of rollouts of each task to learn from, highest rewards first; None: all."""
    min_reward: float | None = None
    """Minimum reward of a rollout to learn from."""

    def __post_init__(self) -> None:
        require_least(1, best_of=self.best_of or 1)
        super().__post_init__()
        self._rows: list[TrainingRow] = []
        self._n_examples = 0

    async def read_examples(self) -> Sequence[FineTuningExample]:
        return await read_examples(self.source, self.min_reward, self.best_of)

    def prepare(self, policy: Policy, examples: Sequence[FineTuningExample]) -> UpdateSettings:
        self._n_examples = len(examples)
        self._rows, too_long = make_rows(policy, examples)
        self.warn_too_long(too_long, "messages", policy)
        if not self._rows:
            source = hide_password(self.source)
            raise ConfigError(f"source = {source!r} has no assistant message that fits the model")
        return UpdateSettings(
            objective="cross_entropy",
            lr=self.lr,
            schedule=self.schedule,
            total_updates=self.epochs * self._steps_per_epoch,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.order_seed,
        )

    def run_epoch(self, updater: Updater) -> dict[str, float]:
        order = list(range(len(self._rows)))
        random.Random(f"{self.order_seed}/{self.count_epochs(updater)}").shuffle(order)
        steps = [
            updater.update([self._rows[index] for index in order[start : start + self.batch_size]])
            for start in range(0, len(order), self.batch_size)
        ]
        return {
            **mean_metrics(steps, ("loss", "grad_norm", "lr", "tokens_per_s")),
            **{name: sum(step[name] for step in steps) for name in ("rows", "response_tokens", "skipped_steps")},
            "conversations": float(self._n_examples),
        }

    def count_epochs(self, updater: Updater) -> int:
        return updater.updates // self._steps_per_epoch

    @property
    def _steps_per_epoch(self) -> int:
        return -(-len(self._rows) // self.batch_size)
