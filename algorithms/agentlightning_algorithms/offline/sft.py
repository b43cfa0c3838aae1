"""The algorithm ``sft``: fine-tunes a model's weights on conversations from good rollouts or from a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.store.protocol import LightningStore
from agentlightning.store.url import hide_password
from agentlightning_algorithms.offline.training import OfflineTraining, make_rows, mean_metrics
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_plugins.shared.chat_history.fine_tuning import FineTuningExample, select_examples


@dataclass(kw_only=True, eq=False, repr=False)
class SFT(OfflineTraining):
    """Supervised fine-tuning: maximises the likelihood of the assistant's messages in conversations.

    With the rollouts of a run as ``source`` this is rejection sampling, as in RFT (Yuan et al. 2023, arXiv:2308.01825).
    The agent is not run.

    Raises:
        ConfigError: a value out of range, or a ``model`` that is a path without a model.
    """

    name: ClassVar[str] = "sft"
    form: ClassVar[str] = '{"messages": [{"role": "user", "content": "..."}, ...]}'

    best_of: int | None = None
    """Number of rollouts of each task to learn from, highest rewards first; None: all."""
    min_reward: float | None = None
    """Minimum reward of a rollout to learn from."""

    def __post_init__(self) -> None:
        require_least(1, best_of=self.best_of)
        if self.source.endswith(".jsonl") and (self.min_reward is not None or self.best_of is not None):
            raise ConfigError(
                f"min_reward and best_of select rollouts, but source = {self.source!r} is a file; leave them out"
            )
        super().__post_init__()
        self._n_examples = 0

    def parse_line(self, line: Any) -> FineTuningExample:
        return FineTuningExample.model_validate(line)

    def select(self, store: LightningStore) -> AsyncIterator[FineTuningExample]:
        return select_examples(store, self.min_reward, self.best_of)

    @property
    def missing(self) -> str:
        return (
            "conversation to learn from; a rollout counts if it succeeded, has a reward of at least min_reward = "
            f"{self.min_reward}, called a model, and is not one of validation or test"
        )

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
