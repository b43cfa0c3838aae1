"""Rollouts for verl: queued in our store, run by our runners, sampled through our gateway, and read back as rows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import aiohttp

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, serve_models
from agentlightning.errors import AdapterError, ConfigError, ConflictError
from agentlightning.resources import Resource
from agentlightning.reward import find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Dataset, EnqueueRolloutRequest, Rollout, RolloutConfig, Span, Triplet
from agentlightning_algorithms.verl.rollout.metric import Outcome, RolloutMetrics
from agentlightning_algorithms.verl.rollout.row import Row, RowKind, build_rows, placeholder_row

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
Mode = Literal["train", "val"]

MODEL_NAMES: Final[Mapping[Mode, str]] = {"train": "policy", "val": "policy-val"}
"""What agents call the model, by what their rollout is for: the gateway forces each one's sampling."""
_OF_AGENTS: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Of the sampling, what agents are told: OpenAI's client takes no other names; the gateway forces all of it."""
_OPEN: Final = ("queuing", "preparing", "running", "requeuing")
_READY_S: Final = 600.0


@dataclass(frozen=True)
class RolloutSettings:
    """What the controller does with every rollout; ``VERL`` explains each."""

    rows: RowKind
    failed_reward: float
    rollout_timeout_s: float
    drain_timeout_s: float
    resource_name: str
    max_prompt: int
    max_response: int
    token_id: int
    """Of the tokens of a rollout that gave none."""
    sampling: Mapping[Mode, Mapping[str, Any]]


@dataclass(frozen=True)
class Episode:
    """A finished rollout, as verl trains on it."""

    rows: list[Row]
    """At least one."""
    reward: float
    calls: int


@dataclass
class RolloutController:
    """Joins verl's trainer, which runs in a thread, with store and gateway, which belong to an event loop."""

    store: LightningStore
    gateway: Gateway
    adapter: TraceAdapter[Sequence[Triplet]]
    tasks: Mapping[Mode, Dataset[Any]]
    initial_resources: Mapping[str, Resource]
    settings: RolloutSettings
    loop: asyncio.AbstractEventLoop
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    failure: BaseException | None = None
    """The first error that was ours and not an agent's."""
    _resources: dict[Mode, str] = field(default_factory=dict)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop, from the trainer's thread, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def check(self) -> None:
        """Raises the first error that was ours: verl would count it as the agent's and go on."""
        if self.failure is not None:
            message = f"a rollout could not be run, and it was not its agent's fault: {self.failure}"
            raise RuntimeError(message) from self.failure

    async def register(self, addresses: Sequence[str]) -> None:
        """Makes inference replicas (``host:port``) the backends of the gateway's models."""
        names = await asyncio.gather(*(_ask_model_name(address) for address in addresses))
        ours = [
            {
                "model": name,
                "model_name": MODEL_NAMES[mode],
                "endpoint": f"http://{address}/v1",
                "sampling_parameters": dict(self.settings.sampling[mode]),
            }
            for mode in MODEL_NAMES
            for address, name in zip(addresses, names, strict=True)
        ]
        serve_models(self.gateway, ours)

    async def pause(self) -> None:
        """Makes agents' new calls wait and lets those in flight end, so that replicas can sleep."""
        await self.gateway.pause()
        if not await self.gateway.drain(self.settings.drain_timeout_s):
            self.metrics.count("drain_timeouts")
            logger.warning(
                "model calls were still in flight after %s s and will break off; raise drain_timeout_s if answers "
                "take longer",
                self.settings.drain_timeout_s,
            )

    async def publish(self, version: int) -> None:
        """Lets calls go on with new weights, and publishes the resources of rollouts that begin from now on."""
        for mode in ("val", "train"):  # the newest resources are those for training
            sampling = {name: value for name, value in self.settings.sampling[mode].items() if name in _OF_AGENTS}
            resource = self.gateway.as_resource(model=MODEL_NAMES[mode], sampling_parameters=sampling)
            resources = {**self.initial_resources, self.settings.resource_name: resource}
            self._resources[mode] = (await self.store.add_resources(resources)).resources_id
        await self.gateway.resume(version)

    async def roll_out(self, mode: Mode, index: int, group: str, step: int) -> Episode:
        """Runs the agent once on a task; whatever the agent does, there is an episode to train on."""
        try:
            rollout = await self._run(mode, index, group, step)
            spans = (await self.store.query_spans(rollout.rollout_id, "latest")).items
            return await asyncio.to_thread(self._read, mode, rollout, spans, step)
        except Exception as error:  # isolation point: the store's or the dataset's; the trainer raises it
            self.failure = self.failure or error
            raise

    async def _run(self, mode: Mode, index: int, group: str, step: int) -> Rollout:
        request = EnqueueRolloutRequest(
            input=self.tasks[mode][index],
            mode=mode,
            resources_id=self._resources[mode],
            metadata={"step": step, "task_id": index, "group": group},
            config=RolloutConfig(
                timeout_seconds=self.settings.rollout_timeout_s, max_attempts=2, retry_condition=["unresponsive"]
            ),
        )
        (queued,) = await self.store.enqueue_many_rollouts([request])
        await self.store.wait_for_rollouts([queued.rollout_id])
        await self.gateway.flush()
        rollout = await self.store.get_rollout_by_id(queued.rollout_id)
        assert rollout is not None
        return rollout

    def _read(self, mode: Mode, rollout: Rollout, spans: Sequence[Span], step: int) -> Episode:
        settings = self.settings
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        error = ""
        if rollout.status != "succeeded":
            error = attempt.error.type if attempt is not None and attempt.error is not None else rollout.status
        reward = find_final_reward(spans, rollout) if not error else None
        triplets: Sequence[Triplet] | None = []
        try:
            triplets = self.adapter.adapt(spans) if attempt is None else self.adapter.adapt_attempt(attempt, spans)
        except AdapterError as adapter_error:
            logger.warning("rollout %s has nothing to train on: %s", rollout.rollout_id, adapter_error)
            error = error or "AdapterError"
        if triplets and not isinstance(triplets[0], Triplet):
            raise ConfigError(
                f"the adapter {type(self.adapter).__name__} makes {type(triplets[0]).__name__}, and verl trains on "
                "triplets: leave the trainer's adapter out"
            )
        if triplets is None:
            error, reward, triplets = error or "SpansDropped", None, []
        built = build_rows(
            triplets, kind=settings.rows, max_prompt=settings.max_prompt, max_response=settings.max_response
        )
        self.metrics.add(
            Outcome.of(mode, rollout, error, reward, built, spans, step=step, failed_reward=settings.failed_reward)
        )
        return Episode(
            rows=built.rows or [placeholder_row(settings.token_id)],
            reward=settings.failed_reward if reward is None else reward,
            calls=built.calls,
        )


async def cancel_open(store: LightningStore) -> None:
    """Cancels what an earlier life of the run left behind: its steps since the checkpoint are done again."""
    left = await store.query_rollouts(status_in=_OPEN)
    for rollout in left.items:
        with contextlib.suppress(ConflictError):  # it ended meanwhile
            await store.cancel_rollout(rollout.rollout_id)


async def _ask_model_name(address: str) -> str:
    """What an inference server calls the model that it serves; waits until it answers."""
    timeout = aiohttp.ClientTimeout(total=_READY_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://{address}/v1/models") as answer,
    ):
        answer.raise_for_status()
        listed = await answer.json()
    name: str = listed["data"][0]["id"]
    return name
