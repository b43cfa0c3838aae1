"""The algorithm ``sft``: fine-tunes a model's weights on conversations from good rollouts or from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.store.url import hide_password
from agentlightning_algorithms.offline.training import OfflineTraining, make_rows, mean_metrics, read_examples
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_plugins.shared.chat_history.fine_tuning import FineTuningExample


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
        self._n_examples = 0

    async def read_examples(self) -> Sequence[FineTuningExample]:
        return await read_examples(self.source, self.min_reward, self.best_of)

    def prepare(self, policy: Policy, examples: Sequence[FineTuningExample]) -> list[TrainingRow]:
        self._n_examples = len(examples)
        rows, too_long = make_rows(policy, examples)
        self.warn_too_long(too_long, "messages", policy)
        if not rows:
            source = hide_password(self.source)
            raise ConfigError(f"source = {source!r} has no assistant message that fits the model")
        return rows

    def step(self, updater: Updater, rows: Sequence[TrainingRow]) -> dict[str, float]:
        return updater.update(rows)

    def describe_epoch(self, steps: Sequence[Mapping[str, float]], n_items: int) -> dict[str, float]:
        return {
            **mean_metrics(steps, ("loss", "grad_norm", "lr", "tokens_per_s")),
            **{name: sum(step[name] for step in steps) for name in ("rows", "response_tokens", "skipped_steps")},
            "conversations": float(self._n_examples),
        }
