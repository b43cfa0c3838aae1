"""The algorithm ``sft``, and its base, which ``dpo`` shares: settings, examples, epochs and checkpoints."""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import ValidationError

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import bind_fields, require_least
from agentlightning.resources import LLM, Resource
from agentlightning.run.directory import atomic_directory
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.store.url import hide_password
from agentlightning.types import Dataset, Rollout
from agentlightning_algorithms.shared.live_resources import LiveExperience
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.server.request import CompletionError, read_messages
from agentlightning_algorithms.shared.policy.settings import Aggregation, LoraSettings, UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_algorithms.shared.trained_model import TrainingRecord, find_model
from agentlightning_plugins.shared.chat_history import FineTuningExample, select_examples
from agentlightning_plugins.shared.configuration.sources import load_dataset

logger = logging.getLogger("agentlightning")


@dataclass(kw_only=True, eq=False, repr=False)
class OfflineTraining(Algorithm):
    """Training of a model's weights on examples from a file or from recorded rollouts, in epochs."""

    default_adapter: ClassVar[str | None] = None
    runs_agent: ClassVar[bool] = False
    name: ClassVar[str]
    aggregation: ClassVar[Aggregation] = "token-mean"

    model: str
    """Directory of a model or of a run that trained one, or a hub name."""
    source: str | None = None
    """A .jsonl file in the format of OpenAI's fine-tuning, the directory of a run, or the URL of a store. Needed except
    for live learning."""
    epochs: int = 1
    """Passes over the examples."""
    batch_size: int = 16
    """Messages (``sft``) or pairs (``dpo``) in an optimizer step."""
    lr: float = 1e-5
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate to a tenth."""
    max_tokens_per_microbatch: int = 8192
    """Bound on memory, padding included."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    lora: LoraSettings | None = None
    """Train low-rank adapters; None: all weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of computation; trained weights stay in float32."""
    device: str = "cpu"
    train_threads: int | None = None
    """Torch threads; None: torch's default."""
    seed: int | None = None
    """Seed of the order of examples; None: the run's seed."""

    weight_decay: float = 0.0
    """Weight decay of matrices; norms and biases do not decay."""
    warmup_updates: int = 0
    """Optimizer steps in which the learning rate rises linearly to ``lr``."""
    val_source: str | None = None
    """Examples to validate with, as ``source``, before the first epoch and after each; None: no validation."""
    adapters: str | None = None
    """For live learning: the folder to which ``propose`` writes LoRA adapters, as in ``agl serve --adapters``."""

    def __post_init__(self) -> None:
        bind_fields(self, self.name)
        require_least(1, epochs=self.epochs, batch_size=self.batch_size)
        if (self.source is None) == (self.adapters is None):
            raise ConfigError(f"{self.name}: give source, or adapters for live learning, and not both")
        if self.adapters is not None and self.lora is None:
            raise ConfigError(f"{self.name}: adapters = {self.adapters!r} needs lora, such as lora: {{rank: 16}}")
        self.model = find_model(self.model)
        self._updater: Updater | None = None
        self._resume_from: Path | None = None

    form: ClassVar[str]
    """Example of a line of a file, for errors."""

    @abstractmethod
    def parse_line(self, line: Any) -> Any:
        """Returns the example on a line of a file, or raises a ValidationError or a CompletionError."""

    @abstractmethod
    def select(self, store: LightningStore, rollouts: Sequence[Rollout] | None = None) -> AsyncIterator[Any]:
        """Yields examples from these rollouts; None: from all of a run or store."""

    @property
    @abstractmethod
    def missing(self) -> str:
        """Says what a source without examples lacks."""

    @abstractmethod
    def prepare(self, policy: Policy, examples: Sequence[Any]) -> list[Any]:
        """Returns what the epochs shuffle and train on, such as rows; called before a checkpoint is loaded."""

    @abstractmethod
    def step(self, updater: Updater, items: Sequence[Any]) -> dict[str, float]:
        """Makes an optimizer step with a batch of what ``prepare`` returned, and returns its metrics."""

    @abstractmethod
    def describe_epoch(self, steps: Sequence[Mapping[str, float]], n_items: int) -> dict[str, float]:
        """Returns the metrics of an epoch, given the metrics of its steps."""

    @abstractmethod
    def validate(self, updater: Updater, items: Sequence[Any]) -> dict[str, float]:
        """Returns metrics of what ``prepare`` returned under the current weights, which do not change."""

    async def read_examples(self, source: str | None = None) -> list[Any]:
        """Returns the examples of ``source``, by default the setting.

        Raises:
            ConfigError: there is no such source, a line is not of this form, or no rollout can be learned from.
        """
        found, source = [], source or self.source or ""
        if source.endswith(".jsonl"):
            lines = load_dataset(source)
            for number in range(len(lines)):
                try:
                    found.append(self.parse_line(lines[number]))
                except (ValidationError, CompletionError) as error:
                    raise ConfigError(f"{source}:{number + 1} is not of the form {self.form}: {error}") from error
        else:
            store = create_store(source)
            try:
                found = [example async for example in self.select(store)]
            finally:
                await store.close()
        if not found:
            raise ConfigError(f"source = {hide_password(source)!r} has no {self.missing}")
        return found

    @property
    def order_seed(self) -> int:
        return self.context.seed if self.seed is None else self.seed

    def save_state(self, directory: Path) -> None:
        """Writes weights, optimizer, random state and number of updates."""
        if self._updater is not None:
            self._updater.write(directory, self._updater.state())

    def load_state(self, directory: Path) -> None:
        """Makes ``run`` continue from what ``save_state`` wrote."""
        self._resume_from = directory

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains for ``epochs``; the datasets are not used."""
        if self.source is None:
            raise ConfigError(f"{self.name}: a training needs source; adapters is for live learning")
        examples = await self.read_examples()
        held_out = [] if self.val_source is None else await self.read_examples(self.val_source)
        updater, items, val_items = await asyncio.to_thread(self._open, examples, held_out)
        self._updater = updater
        directory = self.context.directory
        if directory is not None:
            self._describe(len(examples)).write(directory)
        if val_items and not updater.updates:
            await self.get_store().add_metrics(0, await asyncio.to_thread(self.validate, updater, val_items))
        while (epoch := updater.updates // self._count_steps(items)) < self.epochs:
            metrics = await asyncio.to_thread(self.run_epoch, updater, items, epoch)
            if val_items:
                metrics |= await asyncio.to_thread(self.validate, updater, val_items)
            metrics["progress"] = (epoch + 1) / self.epochs
            await self.get_store().add_metrics(epoch + 1, metrics)
            await asyncio.to_thread(self.checkpoint)
        self._updater = None

    async def propose(self, experience: LiveExperience) -> dict[str, Resource] | None:
        """Trains an adapter on served rollouts, beginning with the one that is served, and returns the LLM with it.

        The adapter is the folder ``live-N`` of ``adapters``, and N is the next free number.

        Raises:
            ConfigError: ``adapters`` is not set, or the resources do not have exactly one LLM.
        """
        if self.adapters is None:
            raise ConfigError(f"{self.name}: live learning needs adapters, the folder of agl serve --adapters")
        llms = {name: value for name, value in experience.resources.items() if type(value) is LLM}
        if len(llms) != 1:
            found = ", ".join(experience.resources) or "none"
            raise ConfigError(f"{self.name}: live learning needs one LLM among the resources; there are: {found}")
        name, llm = next(iter(llms.items()))
        examples = [each async for each in self.select(experience.store, [each.rollout for each in experience.results])]
        if not examples:
            return None
        model = await asyncio.to_thread(self._train_adapter, examples, Path(self.adapters), llm.model)
        return {name: llm.model_copy(update={"model": model})}

    def _train_adapter(self, examples: Sequence[Any], folder: Path, served: str) -> str:
        updater, items, _ = self._open(examples, [])
        if (folder / served).is_dir():
            updater.policy.load_weights(folder / served)
        for epoch in range(self.epochs):
            self.run_epoch(updater, items, epoch)
        numbers = [int(path.name[5:]) for path in folder.glob("live-*") if path.name[5:].isdecimal()]
        target = folder / f"live-{max(numbers, default=0) + 1}"
        with atomic_directory(target) as scratch:
            updater.policy.save(scratch, merge=False)
        return target.name

    def run_epoch(self, updater: Updater, items: Sequence[Any], epoch: int) -> dict[str, float]:
        """Makes the optimizer steps of an epoch and returns its metrics."""
        order = list(range(len(items)))
        random.Random(f"{self.order_seed}/{epoch}").shuffle(order)
        steps = [
            self.step(updater, [items[index] for index in order[start : start + self.batch_size]])
            for start in range(0, len(order), self.batch_size)
        ]
        return self.describe_epoch(steps, len(items))

    def update_settings(self, items: Sequence[Any]) -> UpdateSettings:
        """Returns the settings of the weight updates, given what ``prepare`` returned."""
        return UpdateSettings(
            objective="cross_entropy",
            aggregation=self.aggregation,
            lr=self.lr,
            schedule=self.schedule,
            total_updates=self.epochs * self._count_steps(items),
            warmup_updates=self.warmup_updates,
            weight_decay=self.weight_decay,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.order_seed,
        )

    def _count_steps(self, items: Sequence[Any]) -> int:
        """Returns the number of optimizer steps in an epoch."""
        return -(-len(items) // self.batch_size)

    def _open(self, examples: Sequence[Any], held_out: Sequence[Any]) -> tuple[Updater, list[Any], list[Any]]:
        """Loads the model and the checkpoint, and prepares the examples."""
        if self.train_threads is not None:
            torch.set_num_threads(self.train_threads)
        policy = load_policy(self.model, dtype="float32" if self.lora is None else self.dtype, device=self.device)
        if self.lora is not None:
            from agentlightning_algorithms.shared.policy.lora import add_lora  # peft takes seconds to import

            torch.manual_seed(self.order_seed)
            add_lora(policy.model, self.lora)
        val_items = self.prepare(policy, held_out) if held_out else []
        items = self.prepare(policy, examples)
        updater = Updater(policy, self.update_settings(items), autocast=self.dtype != "float32")
        if self._resume_from is not None:
            updater.load(self._resume_from)
        return updater, items, val_items

    def require_targets(self, policy: Policy, rows: Sequence[TrainingRow], what: str) -> None:
        """Refuses answers of which only the end can be learned, because a model that learns it stops answering."""
        source = hide_password(self.source or "live rollouts")
        if not rows:
            raise ConfigError(f"source = {source!r} has no {what} that fits the model")
        if all(policy.stop_ids.issuperset(row.response_ids) for row in rows):
            raise ConfigError(
                f"source = {source!r}: all {len(rows)} answers to learn from are empty for this model's chat template; "
                "write them as content or tool_calls of messages of the role assistant"
            )

    def warn_too_long(self, count: int, what: str, policy: Policy) -> None:
        """Logs how many examples were skipped."""
        if count:
            logger.warning("%d %s exceed the model's %d tokens and are skipped", count, what, policy.max_length)

    def _describe(self, examples: int) -> TrainingRecord:
        return TrainingRecord(
            algorithm=self.name,
            base=self.model,
            sampling={"temperature": 0.0},
            device=self.device,
            dtype=self.dtype,
            train_tasks=examples,
            settings=asdict(self),
        )


def mean_metrics(steps: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Returns the means of metrics over the steps that have them; skipped steps lack some."""
    found = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: statistics.fmean(values) for name, values in found.items() if values}


def make_rows(policy: Policy, examples: Sequence[FineTuningExample]) -> tuple[list[TrainingRow], int]:
    """Returns a row for each assistant message, and the number of messages that are too long for the model.

    A conversation that cannot be read or that the model's chat template refuses is skipped, with a warning.
    Messages with a ``weight`` of 0 are not learned, as in OpenAI's fine-tuning.
    The prompt is what the model would receive at that point, so its tokens are the same as in sampling.
    """
    rows: list[TrainingRow] = []
    too_long = 0
    for example in examples:
        try:
            tokenized = list(_tokenize(policy, example))
        except Exception as error:  # isolation point: the template is the model's, and agents wrote the messages
            logger.warning("a conversation is skipped, because it cannot be rendered: %s", error)
            continue
        for prompt_ids, response_ids in tokenized:
            if len(prompt_ids) + len(response_ids) > policy.max_length:
                too_long += 1
            else:
                rows.append(TrainingRow(prompt_ids, response_ids, [0.0] * len(response_ids), 1.0))
    return rows, too_long


def _tokenize(policy: Policy, example: FineTuningExample) -> Iterator[tuple[list[int], list[int]]]:
    messages = read_messages(example.messages)

    def render(count: int, *, generate: bool) -> str:
        tools: Any = list(example.tools or ()) or None
        return str(
            policy.tokenizer.apply_chat_template(
                messages[:count], tools=tools, add_generation_prompt=generate, tokenize=False
            )
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = policy.tokenizer.encode(text, add_special_tokens=False)
        return ids

    for position, message in enumerate(messages):
        if message.get("role") != "assistant" or message.get("weight") == 0:
            continue
        prompt, whole = render(position, generate=True), render(position + 1, generate=False)
        if not whole.startswith(prompt):  # the template adds something before answers that this message lacks
            continue
        response_ids = encode(whole[len(prompt) :])
        ends = [place for place, token in enumerate(response_ids) if token in policy.stop_ids]
        prompt_ids, response_ids = encode(prompt), response_ids[: ends[-1] + 1] if ends else response_ids
        if prompt_ids and response_ids:
            yield prompt_ids, response_ids


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
        if self.adapters is not None and self.min_reward is None and self.best_of is None:
            raise ConfigError("sft: give min_reward, or live learning also learns from the failures")
        if (self.source or "").endswith(".jsonl") and (self.min_reward is not None or self.best_of is not None):
            raise ConfigError(
                f"min_reward and best_of select rollouts, but source = {self.source!r} is a file; leave them out"
            )
        super().__post_init__()
        self._n_examples = 0

    def parse_line(self, line: Any) -> FineTuningExample:
        example = FineTuningExample.model_validate(line)
        read_messages(example.messages)
        return example

    def select(
        self, store: LightningStore, rollouts: Sequence[Rollout] | None = None
    ) -> AsyncIterator[FineTuningExample]:
        return select_examples(store, self.min_reward, self.best_of, rollouts)

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
        self.require_targets(policy, rows, "assistant message")
        return rows

    def step(self, updater: Updater, rows: Sequence[TrainingRow]) -> dict[str, float]:
        return updater.update(rows)

    def validate(self, updater: Updater, items: Sequence[TrainingRow]) -> dict[str, float]:
        total = sum(map(sum, updater.score(items)))
        return {"val_loss": -total / sum(row.n_sampled for row in items)}

    def describe_epoch(self, steps: Sequence[Mapping[str, float]], n_items: int) -> dict[str, float]:
        return {
            **mean_metrics(steps, ("loss", "grad_norm", "lr", "tokens_per_s")),
            **{name: sum(step[name] for step in steps) for name in ("rows", "response_tokens", "skipped_steps")},
            "conversations": float(self._n_examples),
        }
