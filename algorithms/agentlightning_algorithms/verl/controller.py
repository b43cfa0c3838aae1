"""Runs rollouts for verl: queued in our store, run by our runners, sampled through our gateway, read back as rows."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

import aiohttp

from agentlightning import semconv
from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.algorithm import Gateway
from agentlightning.errors import AdapterError, ConfigError
from agentlightning.resources import Resource
from agentlightning.reward import count_failed
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Dataset, EnqueueRolloutRequest, Triplet
from agentlightning_algorithms.shared.policy_backend import serve_models
from agentlightning_algorithms.shared.rollout_result import RolloutResult, cancel_rollouts, read_result, retry_lost
from agentlightning_algorithms.verl.batch_row import REMAX, BatchRow, RowKind, build_rows, placeholder_row
from agentlightning_algorithms.verl.images import ImageLoader
from agentlightning_algorithms.verl.metrics import RolloutMetrics, RolloutStats
from agentlightning_plugins.shared.training_records.record import LedgerEntry, Outcome, RolloutOutcome, count_sampled

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
Mode = Literal["train", "val", "greedy"]
"""``greedy``: a rollout on a training task whose reward is the baseline of ReMax."""

MODEL_NAMES: Final[Mapping[Mode, str]] = {"train": "policy", "val": "policy-val", "greedy": "policy-greedy"}
"""The model's name in each mode: the gateway forces different sampling parameters on each name."""
_NO_PENALTIES: Final = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_AGENT_PARAMETERS: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""The sampling parameters that agents receive: OpenAI's client accepts no others. The gateway forces all of them."""
_OPEN_STATUSES: Final = ("queuing", "preparing", "running", "requeuing")
_READY_S: Final = 600.0


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutSettings:
    """Settings that ``VERL`` passes on to the rollout controller."""

    rows: RowKind = "transitions"
    """The rows that verl trains on: ``transitions`` makes a row of every call, ``trajectories`` joins the calls of a
    rollout where a prompt continues the tokens before it, which trains on fewer tokens."""
    failed_reward: float = 0.0
    """Reward of a rollout that failed, has no reward, or has spans that cannot be used, unless the lowest reward of its
    group (or of the run, if its group has none) is lower: then that one."""
    rollout_timeout_s: float = 600.0
    """Seconds after which a rollout is stopped and counts as failed."""
    drain_timeout_s: float = 600.0
    """Seconds that calls in flight have to end before weights change; after that they are aborted."""
    resource_name: str = "llm"
    """Name of the resource by which agents receive the model."""

    def __post_init__(self) -> None:
        if self.rows not in get_args(RowKind):
            raise ConfigError(f"rows = {self.rows!r}; one of: {', '.join(get_args(RowKind))}")
        for name in ("rollout_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: a number above 0 is needed")


@dataclass(frozen=True)
class VerlEpisode:
    """A finished rollout, as verl trains on it."""

    rows: list[BatchRow]
    """The rows of the rollout: none if it has no place in its group, else at least one."""
    reward: float
    calls: int
    record: dict[str, Any] = field(default_factory=dict)
    """Data for the training record: ``rollout`` (arguments of ``RolloutOutcome``) and ``left_out`` (reasons why calls
    are in no row, by name)."""


@dataclass
class RolloutController:
    """Connects verl's trainer, which runs in a thread, with store and gateway, which belong to an event loop."""

    store: LightningStore
    gateway: Gateway
    adapter: TraceAdapter[Sequence[Triplet]]
    tasks: Mapping[Mode, Dataset[Any]]
    initial_resources: Mapping[str, Resource]
    settings: RolloutSettings
    config: DictConfig
    """verl's configuration."""
    loop: asyncio.AbstractEventLoop
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    images: ImageLoader = field(default_factory=ImageLoader)
    failure: BaseException | None = None
    """The first error that did not come from an agent."""
    _resources: dict[Mode, str] = field(default_factory=dict)
    entries: deque[LedgerEntry] = field(default_factory=deque)
    """Ledger entries of rollouts that are not in verl's batch."""
    _groups: dict[tuple[Mode, str], list[asyncio.Future[RolloutResult | None]]] = field(default_factory=dict)
    """The results of the groups that are running, None for rollouts that could not be run."""
    _greedy: dict[str, asyncio.Task[VerlEpisode]] = field(default_factory=dict)
    """The greedy rollout of each group that is running, with ReMax."""
    _places: dict[str, int] = field(default_factory=dict)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the event loop from the trainer's thread, and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def check(self) -> None:
        """Raises the first error that did not come from an agent: verl itself would continue."""
        if self.failure is not None:
            message = f"a rollout could not be run, and its agent is not the cause: {self.failure}"
            raise RuntimeError(message) from self.failure

    async def register(self, addresses: Sequence[str]) -> None:
        """Makes inference replicas (``host:port``) the backends of the gateway's models."""
        names = await asyncio.gather(*(_fetch_model_name(address) for address in addresses))
        entries = [
            {
                "model": name,
                "model_name": MODEL_NAMES[mode],
                "endpoint": f"http://{address}/v1",
                "sampling_parameters": self._sampling(mode),
            }
            for mode in self._modes
            for address, name in zip(addresses, names, strict=True)
        ]
        serve_models(self.gateway, entries)

    @property
    def _modes(self) -> list[Mode]:
        """The modes of rollouts; training is the last, because agents outside a run get the latest resources."""
        own: list[Mode] = ["val", "train"]
        return ["greedy", *own] if self.config.algorithm.adv_estimator == REMAX else own

    def withdraw(self) -> None:
        """Takes the replicas out of the gateway, before they end: it would report that they are down."""
        names = MODEL_NAMES.values()
        others = [dict(entry) for entry in self.gateway.model_list if entry.get("model_name") not in names]
        self.gateway.update_model_list(others)

    def _sampling(self, mode: Mode) -> dict[str, Any]:
        if mode == "greedy":
            return {"temperature": 0.0, "top_p": 1.0, "top_k": -1, **_NO_PENALTIES}
        rollout = self.config.actor_rollout_ref.rollout
        given = rollout if mode == "train" else rollout.val_kwargs
        return {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k, **_NO_PENALTIES}

    async def pause(self) -> None:
        """Holds new calls back and lets calls in flight end, so that replicas can sleep."""
        await self.gateway.pause()
        if not await self.gateway.drain(self.settings.drain_timeout_s):
            text = "calls in flight after drain_timeout_s = %s will be aborted; raise it if answers take longer"
            logger.warning(text, self.settings.drain_timeout_s)

    async def publish(self, version: int) -> None:
        """Publishes the resources for new rollouts, and lets calls continue with the new weights."""
        for mode in self._modes:
            sampling = {name: value for name, value in self._sampling(mode).items() if name in _AGENT_PARAMETERS}
            resource = self.gateway.as_resource(model=MODEL_NAMES[mode], sampling_parameters=sampling)
            resources = {**self.initial_resources, self.settings.resource_name: resource}
            self._resources[mode] = (await self.store.add_resources(resources)).resources_id
        await self.gateway.resume(version)

    def order(self, groups: Sequence[str]) -> None:
        """Takes the groups of a batch, in its order: verl starts them in an order that depends on time."""
        for group in groups:
            self._places.setdefault(group, len(self._places))

    def place_of(self, key: str) -> tuple[int, int, int]:
        """Returns the place of a row, ``{group}_{rollout}_{row}``, in the order of the batches."""
        group, rollout, row = key.rsplit("_", 2)
        return self._places.get(group, -1), int(rollout), int(row)

    def begin_greedy(self, index: int, group: str, step: int) -> asyncio.Task[VerlEpisode]:
        """Starts the greedy rollout of a task, which all rollouts of the group share."""
        if group not in self._greedy:
            self._greedy[group] = asyncio.create_task(self.roll_out("greedy", index, group, step))
        return self._greedy[group]

    async def roll_out(self, mode: Mode, index: int, group: str, step: int) -> VerlEpisode:
        """Runs the agent once on a task; returns an episode even if the agent fails.

        The episode of a rollout without a reward waits for the other results of its group. A rollout whose model call
        failed does not count in its group, as in ``grpo``. If it leaves one rollout alone, it has that rollout's
        reward: verl would take the reward of a single rollout for its advantage.
        """
        own: asyncio.Future[RolloutResult | None] = asyncio.get_running_loop().create_future()
        members = self._groups.setdefault((mode, group), [])
        members.append(own)
        try:
            request = EnqueueRolloutRequest(
                input=self.tasks["val" if mode == "val" else "train"][index],
                mode="val" if mode == "val" else "train",
                resources_id=self._resources[mode],
                metadata={"step": step, "task_id": index, "group": group},
                config=retry_lost(self.settings.rollout_timeout_s, max_attempts=2),
            )
            (queued,) = await self.store.enqueue_many_rollouts([request])
            await self.store.wait_for_rollouts([queued.rollout_id])
            await self.gateway.flush()
            rollout = await self.store.get_rollout_by_id(queued.rollout_id)
            assert rollout is not None
            result = await read_result(self.store, rollout)
            own.set_result(result)
            if result.valid_reward is None:
                await asyncio.wait(members)
            ended = [found for each in members if each.done() and (found := each.result()) is not None]
            others = [each for each in ended if each.error_type != MODEL_ERROR]
            known = [each.valid_reward for each in others if each.valid_reward is not None]
            failed_reward = count_failed(known or [self.metrics.lowest], self.settings.failed_reward)
            if result.error_type == MODEL_ERROR and known:
                (failed_reward, *_) = known  # the reward of the only one; if there are more, the rows are cleared below
            episode = await asyncio.to_thread(self._to_episode, mode, result, failed_reward)
            if result.error_type == MODEL_ERROR and len(others) > 1:
                episode.rows.clear()
            if mode == "greedy" or (mode == "train" and not episode.rows):
                calls: dict[str, Outcome] = {call.name: "baseline" for row in episode.rows for call in row.calls}
                outcome = RolloutOutcome(**episode.record["rollout"])
                if outcome.attempt_id:
                    self.entries.append(outcome.to_entry(step, episode.record["left_out"] | calls))
            return episode
        except Exception as error:  # isolation point: a store's or dataset's error, which ``check`` raises
            self.failure = self.failure or error
            raise
        finally:
            if not own.done():
                own.set_result(None)
            if all(each.done() for each in members):
                self._groups.pop((mode, group), None)
                if mode == "train":
                    self._greedy.pop(group, None)

    def _to_episode(self, mode: Mode, result: RolloutResult, failed_reward: float) -> VerlEpisode:
        settings, rollout, spans = self.settings, result.rollout, result.spans
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        error = result.error_type or ""
        reward = result.valid_reward
        triplets: Sequence[Triplet] | None = []
        try:
            triplets = self.adapter.adapt(spans) if attempt is None else self.adapter.adapt_attempt(attempt, spans)
        except AdapterError as adapter_error:
            logger.warning("rollout %s has nothing to train on: %s", rollout.rollout_id, adapter_error)
            error = error or "AdapterError"
        if triplets and not isinstance(triplets[0], Triplet):
            raise ConfigError(
                f"the adapter {type(self.adapter).__name__} makes {type(triplets[0]).__name__}, but verl trains on "
                "triplets: leave the trainer's adapter out"
            )
        if triplets is None:
            error, triplets = error or "SpansDropped", []
        if error == MODEL_ERROR:  # a reward would be for what the agent could not do
            triplets = []
        # An adapter may not report which model the agent requested.
        own = {None, *MODEL_NAMES.values()}
        triplets = [triplet for triplet in triplets if triplet.metadata.get("requested_model") in own]
        data = self.config.data
        built = build_rows(
            triplets,
            kind=settings.rows,
            max_prompt=data.max_prompt_length,
            max_response=data.max_response_length,
            reward=reward,
            failed_reward=failed_reward,
        )
        for explanation in self.images.load(built, rollout.rollout_id):
            if self.metrics.is_first(mode, "unusable_images"):
                logger.warning("%s: a row is not trained on: %s", rollout.rollout_id, explanation)
        began = rollout.start_time if attempt is None else attempt.start_time
        ended = began if rollout.end_time is None else rollout.end_time
        stats = RolloutStats(
            reward=failed_reward if reward is None else reward,
            source=_find_source(rollout.input),
            calls=triplets,
            has_reward=reward is not None,
            error=error,
            built=built,
            queue_s=max(0.0, began - rollout.start_time),
            run_s=max(0.0, ended - began),
            call_s=[
                span.end_time - span.start_time
                for span in spans
                if semconv.is_gateway_call(span) and span.start_time is not None and span.end_time is not None
            ],
        )
        self.metrics.add(mode, stats)
        if built.mismatches and self.metrics.is_first(mode, "mismatch"):
            found = built.mismatches[0]
            text = "%s: call %s continues call %s, but %s; %d of the rollout's %d calls begin a row of their own"
            ids = rollout.rollout_id, found.response_id, found.previous_response_id
            logger.info(text, *ids, found.explanation, len(built.mismatches), built.calls)
        outcome = {
            "rollout_id": rollout.rollout_id,
            "attempt_id": "" if attempt is None else attempt.attempt_id,
            "group": str((rollout.metadata or {}).get("group", rollout.rollout_id)),
            "reward": None if error == MODEL_ERROR else stats.reward,
            "error": error,
            "has_failed": rollout.status != "succeeded",
            "tokens": count_sampled(triplets),
        }
        record = {"rollout": outcome, "left_out": built.left_out}
        return VerlEpisode(built.rows or [placeholder_row()], stats.reward, built.calls, record)


def _find_source(task: Any) -> str | None:
    """The value of a task's key ``source``, or ``data_source`` as in verl's data sets."""
    if not isinstance(task, Mapping):
        return None
    found = task.get("source", task.get("data_source"))
    return None if found is None else str(found)


async def cancel_open(store: LightningStore) -> None:
    """Cancels the open rollouts of a run that is resumed: the steps since its checkpoint are repeated."""
    left = await store.query_rollouts(status_in=_OPEN_STATUSES)
    await cancel_rollouts(store, [rollout.rollout_id for rollout in left])


async def _fetch_model_name(address: str) -> str:
    """Returns the name under which an inference server serves its model; waits until the server answers."""
    timeout = aiohttp.ClientTimeout(total=_READY_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"http://{address}/v1/models") as answer:
        answer.raise_for_status()
        return str((await answer.json())["data"][0]["id"])
