"""``TrainingSession``: the building blocks of weight training, for custom algorithms."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import aiohttp

from agentlightning.algorithm.context import RunContext
from agentlightning.errors import ConfigError, LightningError
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.grpo.checkpoints.clock import CheckpointClock
from agentlightning_algorithms.grpo.learning.episode import Episode
from agentlightning_algorithms.grpo.learning.updater import Objective
from agentlightning_algorithms.grpo.model.checkpoint import recover_directory
from agentlightning_algorithms.grpo.opening import open_session
from agentlightning_algorithms.grpo.session import Session
from agentlightning_algorithms.grpo.settings.grpo import GRPOSettings, distribution, flatten
from agentlightning_algorithms.grpo.training_row import Distribution, TrainingRow
from agentlightning_plugins.trajectories.trajectory import build_trajectories

_UNUSED: Final = (
    "teacher", "staleness", "test_dataset", "keep_weights_every", "keep_weights_last", "rows", "estimator", "std_floor",
    "keep_flat_groups", "drop_cut_off", "reward_shaping", "rollout_filter",
)  # fmt: skip
"""Settings that only the steps of ``grpo`` use; ``teacher`` is before ``keep_flat_groups``, which it sets."""


class Sample(NamedTuple):
    """An answer sampled from the newest published weights."""

    text: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: int
    distribution: Distribution | None = None
    """The distribution of the tokens; None: the distribution of the settings."""

    def row(self, advantage: float) -> TrainingRow:
        """Returns the sample as a row to train on."""
        return TrainingRow(self.prompt_ids, self.token_ids, self.logprobs, advantage, distribution=self.distribution)


class TrainingSession:
    """A training whose steps are written by the algorithm; :meth:`open` starts the training.

    Attributes:
        settings: the settings, the same as those of ``grpo``.
    """

    def __init__(
        self, core: Session, context: RunContext, train: Dataset[Any] | None, val: Dataset[Any] | None
    ) -> None:
        self.settings = core.settings
        self._core = core
        self._context = context
        self._train = train
        self._val = val
        self._metrics: dict[str, float] = {}
        self._position = core.position
        self._rounds = 0  # rounds of rollouts in the current step, refills included

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        context: RunContext,
        settings: GRPOSettings,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
    ) -> AsyncIterator[TrainingSession]:
        """Starts the policy server and loads the model; continues from the checkpoint in the run's directory.

        Raises:
            ConfigError: the model does not exist, or the checkpoint is of another model.
        """
        if settings.policies:
            raise ConfigError("TrainingSession trains one policy; leave policies out, or use the algorithm grpo")
        for name in _UNUSED:
            if getattr(settings, name) != getattr(GRPOSettings, name):
                raise ConfigError(f"TrainingSession does not use {name}; leave it out, or use the algorithm grpo")
        adapter = context.adapter or get_manager().create("adapter", "triplet")
        directory = context.directory
        checkpoint = None if directory is None else recover_directory(directory / "checkpoint")
        found = checkpoint if checkpoint is not None and checkpoint.is_dir() else None
        seed = context.seed if settings.seed is None else settings.seed
        assert settings.update is not None, "set by __post_init__"
        async with contextlib.AsyncExitStack() as stack:
            update = replace(settings.update, seed=seed)
            core = await open_session(stack, context, adapter, settings, update, found)
            yield cls(core, context, train_dataset, val_dataset)

    @property
    def step(self) -> int:
        """Updates made so far; also the version of the weights."""
        return self._core.updater.updates

    async def steps(self) -> AsyncIterator[int]:
        """Yields the number of each step until ``steps`` or ``target_reward`` is reached.

        The weights are published before each step and evaluated every ``eval_every`` steps. Each step ends with metrics
        and, when due, a checkpoint. A step in which the algorithm makes no update counts as an update without effect.
        """
        settings = self.settings
        await self.publish()
        reached, clock = False, CheckpointClock(settings.checkpoint_every)
        if self.step == 0:
            self.log(await self.evaluate())
            await self._report()
        else:  # the run may have been stopped after it reached its target
            reached = settings.target_reward is not None and self._is_reached(await self.evaluate())
        while self.step < settings.steps and not reached:
            number, started = self.step, time.monotonic()
            yield number
            if self.step == number:
                await self.optim_step()
            await self.publish()
            last = self.step >= settings.steps
            if last or (settings.eval_every and self.step % settings.eval_every == 0):
                self.log(await self.evaluate())
            reached = self._is_reached(self._metrics)
            self.log(
                {"seconds": time.monotonic() - started, "progress": 1.0 if reached else self.step / settings.steps}
            )
            await self._report()
            if clock.is_due(self.step) or last or reached:
                await self.checkpoint()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the current step."""
        self._metrics.update(metrics)

    async def rollouts(self) -> list[list[Episode]]:
        """Rolls out the next ``tasks_per_step`` tasks, ``rollouts_per_task`` times each; returns one list per task."""
        if self._train is None or not len(self._train):
            raise ConfigError("rollouts need a train_dataset with at least one task; give one to TrainingSession.open")
        batch = await self._core.collect(self._train, self.step, self._position, first_round=self._rounds)
        self._position = batch.position
        self._rounds += self.settings.refill_rounds + 1
        self.log({**self._core.describe(batch.episodes), **batch.metrics, "sample_s": batch.seconds})
        groups: dict[str, list[Episode]] = {}
        for episode in batch.episodes:
            groups.setdefault(episode.group, []).append(episode)
        return list(groups.values())

    def rows(self, episodes: Iterable[Episode], advantage: float = 1.0) -> list[TrainingRow]:
        """Returns a row with this advantage for each model call of the episodes that can be trained on."""
        rows = []
        for episode in episodes:
            for trajectory in build_trajectories(episode.triplets).trajectories:
                for turn in trajectory.turns:
                    prompt, response = turn.triplet.prompt, turn.triplet.response
                    drawn = episode.distribution_of(turn.triplet) if self.settings.distribution is None else None
                    row = TrainingRow(
                        prompt["token_ids"],
                        response["token_ids"],
                        response["logprobs"],
                        advantage,
                        rollout=episode.rollout.rollout_id,
                        distribution=drawn,
                    )
                    if row.n_tokens <= self._core.updater.policy.max_length:
                        rows.append(row)
        return rows

    async def sample(self, messages: Sequence[Mapping[str, Any]], n: int = 1, **sampling: Any) -> list[Sample]:
        """Samples ``n`` answers to a conversation from the published weights, without a rollout.

        ``sampling`` are parameters of a chat completion; default: the ``sampling`` of the settings.
        """
        entry = self._core.backend.model_entry
        body = {
            **flatten(self.settings.sampling or {}),
            **sampling,
            "model": entry["model"],
            "messages": list(messages),
        }
        asked = distribution(body)
        # vLLM sets omitted fields to the values in the model's generation_config.json.
        body |= {name: value for name, value in asked.items() if value is not None}
        body |= {"n": n, "logprobs": True, "return_token_ids": True}
        key = entry.get("api_key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(f"{entry['endpoint']}/chat/completions", json=body, headers=headers) as response,
        ):
            answer = await response.json(content_type=None)
            if response.status != 200:
                raise LightningError(f"the policy server answered {response.status}: {answer['error']['message']}")
        version = int(answer.get("weight_version", self.step))
        drawn = Distribution(float(asked["temperature"]), float(asked["top_p"]), max(0, int(asked["top_k"])))
        return [
            Sample(
                choice["message"]["content"] or "",
                answer["prompt_token_ids"],
                choice["token_ids"],
                [token["logprob"] for token in choice["logprobs"]["content"]],
                version,
                None if drawn == self.settings.distribution else drawn,
            )
            for choice in answer["choices"]
        ]

    async def forward_backward(
        self, rows: Sequence[TrainingRow], loss: str | Objective | None = None
    ) -> Mapping[str, float]:
        """Adds the gradient of a loss over rows; see :meth:`Updater.forward_backward`.

        ``loss`` is a function with the signature of a ``policy_loss`` component, or the name of a component, such as
        ``cross_entropy``; default: ``objective``.
        """
        return await asyncio.to_thread(self._core.updater.forward_backward, rows, loss)

    async def optim_step(self) -> dict[str, float]:
        """Updates the weights with the gradients added since the last step; returns and logs metrics."""
        metrics = await asyncio.to_thread(self._core.updater.optim_step)
        metrics["train_s"] = metrics.pop("seconds")
        self._rounds = 0
        await self._core.advance(self._position)
        self.log(metrics)
        return metrics

    async def publish(self) -> None:
        """Makes agents' calls and :meth:`sample` use the newest weights."""
        await self._core.publish()

    async def evaluate(self, dataset: Dataset[Any] | None = None, mode: RolloutMode = "val") -> dict[str, float]:
        """Evaluates the published weights, by default on the validation set; the best are kept in ``best``."""
        return await self._core.evaluate(self._val if dataset is None else dataset, mode)

    async def checkpoint(self) -> None:
        """Writes all that a resumed run needs to the run's directory, atomically; does nothing without a directory."""
        if self._context.directory is not None:
            path = self._context.directory / "checkpoint"
            await asyncio.to_thread(self._core.save, path)

    def _is_reached(self, metrics: Mapping[str, float]) -> bool:
        target = self.settings.target_reward
        return target is not None and metrics.get("val_reward", -math.inf) >= target

    async def _report(self) -> None:
        metrics, self._metrics = self._metrics, {}
        await self._core.report(metrics)
