"""The policies that a run trains, each with its own optimizer: one model, or several LoRA adapters over one."""

from __future__ import annotations

import asyncio
import io
import logging
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from agentlightning.algorithm.algorithm import CHECKPOINT
from agentlightning.errors import ConfigError
from agentlightning.run.directory import atomic_directory
from agentlightning.types import Triplet
from agentlightning_algorithms.grpo.episode import Episode, describe_calls
from agentlightning_algorithms.grpo.experience import Experience, build_experience, describe_advantages
from agentlightning_algorithms.grpo.monitor import TrainingMonitor
from agentlightning_algorithms.grpo.settings import CheckpointSettings, GRPOSettings, PolicySettings
from agentlightning_algorithms.grpo.teacher import Teacher
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.prepared_row import RowUse
from agentlightning_algorithms.shared.policy.settings import UpdateSettings
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_algorithms.shared.trained_model import STEPS

logger = logging.getLogger("agentlightning")

_OF_ROLLOUTS: Final = ("groups", "rollouts_left_out", "rollouts_filled")
"""Counts of rollouts and their groups, which are the same for each policy of a run."""
_SUMMED: Final = ("calls", "drift/", "rows", "response_tokens", "optimizer_steps", "skipped_steps", "seconds")
"""Prefixes of the metrics that are summed over policies."""
MODEL_NAMES = {"train": "policy", "eval": "policy-val"}
"""Names under which agents call the trained model: the gateway forces other sampling parameters on each."""


@dataclass
class TrainedPolicy:
    """A policy, its updater, and the warnings about its training."""

    name: str
    """Name of the policy's adapter; empty for the only policy of a run."""
    resource_name: str
    """Name of the resource that agents receive."""
    updater: Updater
    monitor: TrainingMonitor
    has_warned: bool = False

    @property
    def model_names(self) -> Mapping[str, str]:
        """Model names by which agents call the policy, for training and for evaluation."""
        return {"train": self.name, "eval": f"{self.name}-val"} if self.name else MODEL_NAMES

    @property
    def prefix(self) -> str:
        """Prefix of the policy's metric names."""
        return f"{self.name}/" if self.name else ""

    def select(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Returns the episodes with the calls that this policy sampled."""
        return _select(episodes, [self])

    def learn(
        self, episodes: Sequence[Episode], settings: GRPOSettings, teacher: Teacher | None, oldest_version: int
    ) -> tuple[Experience, dict[str, float]]:
        """Updates the weights once; returns the experience of the update, and metrics."""
        updater, update = self.updater, self.updater.settings
        own = self.select(episodes)
        experience = build_experience(
            own,
            settings.experience,
            max_length=updater.policy.max_length,
            vocabulary=updater.policy.vocabulary,
            decode=self.decode,
            oldest_version=oldest_version,
            distribution=settings.distribution,
        )
        if teacher is not None:
            experience.rows, guidance = teacher.guide(
                experience.rows, temperature=update.temperature, max_tokens=update.max_tokens_per_microbatch
            )
            experience.metrics |= guidance | describe_advantages(experience.rows)
            del experience.metrics["groups_without_spread"]  # the policy learns from them, too
        metrics = updater.update(experience.rows)
        if "tokens_per_s" in metrics:
            metrics["train_tokens_per_s"] = metrics.pop("tokens_per_s")
        if self.name:
            metrics |= describe_calls(own)
            self._warn_without_calls(own)
        return experience, {**experience.metrics, **metrics}

    def own_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics that have the policy's prefix, with the prefix removed."""
        begin = self.prefix
        return {name.removeprefix(begin): value for name, value in metrics.items() if name.startswith(begin)}

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return str(self.updater.policy.tokenizer.decode(list(ids)))

    def _warn_without_calls(self, episodes: Sequence[Episode]) -> None:
        if not self.has_warned and episodes and not any(episode.triplets for episode in episodes):
            self.has_warned = True
            logger.warning(
                "none of %d rollouts called the policy %s; agents call it by the resource %r, whose model is %r",
                len(episodes), self.name, self.resource_name, self.name,
            )  # fmt: skip


class PolicySet:
    """All policies of a run, in the order of the settings."""

    def __init__(self, policies: Sequence[TrainedPolicy]) -> None:
        self._policies = policies

    @classmethod
    def load(cls, settings: GRPOSettings, update: UpdateSettings) -> PolicySet:
        """Loads the model once and makes the policies; all use the seed of ``update``."""
        several = dict(settings.policies or {"": PolicySettings(lora=settings.lora, update=update)})
        has_lora = settings.lora is not None or settings.policies is not None
        base = load_policy(settings.model, dtype=settings.dtype if has_lora else "float32", device=settings.device)
        found = []
        for name, own in several.items():
            assert own is not None, "set by GRPOSettings"
            assert own.update is not None, "set by GRPOSettings"
            policy = base
            if own.lora is not None:
                from agentlightning_algorithms.shared.policy.lora import add_lora, share_weights  # peft takes seconds

                policy = Policy(share_weights(base.model), base.tokenizer) if name else base
                torch.manual_seed(update.seed)
                add_lora(policy.model, own.lora)
            updater = Updater(policy, replace(own.update, seed=update.seed), autocast=settings.dtype != "float32")
            monitor = TrainingMonitor(is_exact=settings.dtype == "float32")
            found.append(TrainedPolicy(name, name or settings.resource_name, updater, monitor))
        return cls(found)

    def __iter__(self) -> Iterator[TrainedPolicy]:
        return iter(self._policies)

    @property
    def first(self) -> TrainedPolicy:
        return self._policies[0]

    def select(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Returns the episodes with the calls that any of the policies sampled."""
        return _select(episodes, self._policies)

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the warnings that begin to hold with the metrics of a step."""
        owned = [(policy, policy.own_metrics(metrics)) for policy in self]
        # The entropy of a policy without calls is unknown; the run's entropy comes from the other policies.
        shared = metrics.keys() - {name for _, own in owned for name in own}
        return [
            f"{policy.name}: {warning}" if policy.name else warning
            for policy, own in owned
            for warning in policy.monitor.observe({**{name: metrics[name] for name in shared}, **own})
        ]

    def publish(self, directory: Path, dtype: str | None = None) -> Path | dict[str, Path]:
        """Writes the weights for the policy backend; returns their directory, or each adapter's directory by name.

        ``dtype`` is the type of the backend's weights, to which full weights are rounded; None: the model's.
        """
        if not self.first.name:
            self.first.updater.policy.save(directory, dtype=dtype)
            return directory
        self.save(directory)
        return {policy.name: directory / policy.name for policy in self}

    def save(self, directory: Path) -> None:
        """Writes the weights of each policy as a model; several policies are written to folders named after them."""
        for policy in self:
            policy.updater.policy.save(directory / policy.name, merge=False)

    def write(self, directory: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes a checkpoint: weights, and the state of each policy's updater by its name."""
        for policy in self:
            policy.updater.write(directory / policy.name, states[policy.name])

    def read(self, directory: Path) -> Mapping[str, Any]:
        """Restores what :meth:`write` wrote, and returns the caller's state, which is stored with each policy."""
        kept: Mapping[str, Any] = {}
        for policy in self:
            kept = policy.updater.load(directory / policy.name)
            policy.monitor.restore(kept["watch"])
        return kept


def join_experience(parts: Sequence[tuple[Experience, Sequence[RowUse]]]) -> tuple[Experience, list[RowUse]]:
    """Returns the rows of all policies as one experience, with their uses, for the records of the step."""
    whole = Experience()
    for experience, _ in parts:
        whole.rows += experience.rows
        whole.sources += experience.sources
        whole.left_out |= experience.left_out
    return whole, [use for _, uses in parts for use in uses]


def join_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Joins the metrics of several policies, each updated once, as if one update had made them.

    Counts and seconds are added; extremes, and counts of rollouts, which all policies share, are kept. Other metrics
    are averaged, weighted by each policy's response tokens, or by seconds for a speed.
    """
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name in _OF_ROLLOUTS or name.endswith("_max"):
            joined[name] = max(values)
        elif name.endswith("_min"):
            joined[name] = min(values)
        elif name.startswith(_SUMMED):
            joined[name] = sum(values)
        else:
            weight = "seconds" if name.endswith("_per_s") else "response_tokens"
            weights = [part.get(weight, 0.0) for part in having]
            joined[name] = statistics.fmean(values, weights if any(weights) else None)
    return joined


def _select(episodes: Sequence[Episode], policies: Sequence[TrainedPolicy]) -> list[Episode]:
    """Returns the episodes without the calls of other models.

    The model name that the agent requested decides: a server may answer with another name of the same model. If an
    adapter does not record the requested name, the answer's name decides between several policies.
    """
    names = {name for policy in policies for name in policy.model_names.values()}

    def is_own(call: Triplet) -> bool:
        asked = call.metadata.get("requested_model")
        if asked is None:
            return call.metadata.get("model") in names if policies[0].name else True
        return asked in names

    return [replace(episode, triplets=list(filter(is_own, episode.triplets))) for episode in episodes]


def copy_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of what a checkpoint stores for a loop; raises ConfigError if a checkpoint cannot hold a value."""
    copies = {}
    for name, value in state.items():
        try:
            torch.save(value, file := io.BytesIO())
            file.seek(0)
            copies[name] = torch.load(file, weights_only=True)
        except Exception as error:  # isolation point: pickling runs the value's own code
            raise ConfigError(
                f"own_state[{name!r}] is a {type(value).__name__}, which a checkpoint cannot hold: store plain values, "
                "lists, dicts and tensors"
            ) from error
    return copies


_WAIT_S, _WAIT_SHARE = 30.0, 0.1
"""If training waits for checkpoints longer, in total and as a share of its time, it writes fewer of them."""


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread; the weights may change only after :meth:`wait`."""

    def __init__(self, policies: PolicySet, directory: Path | None, settings: CheckpointSettings) -> None:
        """Without a directory it writes nothing."""
        self._policies = policies
        self._directory = directory
        self._settings = settings
        self._writing: asyncio.Task[float] | None = None
        self._began = time.monotonic()
        self.seconds: float | None = None
        """Duration of the last checkpoint."""
        self.waited_s = 0.0
        """Total duration of :meth:`wait`."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``."""
        if self._settings.every is not None:
            return step % self._settings.every == 0
        return self.waited_s <= max(_WAIT_S, _WAIT_SHARE * (time.monotonic() - self._began))

    async def begin(self, state: Mapping[str, Mapping[str, Any]] | None, step: int) -> None:
        """Begins to write ``state``, if it is given, and the weights of ``step`` if they are to be kept."""
        await self.wait()
        keeps = bool(self._settings.keep_every) and step % self._settings.keep_every == 0
        if self._directory is not None and (state is not None or keeps):
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, self._directory, state, step, keeps))

    async def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            OSError: the checkpoint could not be written.
        """
        if self._writing is not None:
            started = time.monotonic()
            self.seconds = await asyncio.shield(self._writing)
            self.waited_s += time.monotonic() - started
            self._writing = None

    def _write(self, directory: Path, state: Mapping[str, Mapping[str, Any]] | None, step: int, keeps: bool) -> float:
        started = time.monotonic()
        if state is not None:
            with atomic_directory(directory / CHECKPOINT) as scratch:
                self._policies.write(scratch, state)
        if keeps:
            with atomic_directory(directory / STEPS / str(step)) as scratch:
                self._policies.save(scratch)
        return time.monotonic() - started
