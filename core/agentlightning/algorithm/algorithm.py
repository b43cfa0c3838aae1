"""The base class of algorithms, and ``RunContext``: the store, data and services that they work with."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.errors import ConfigError
from agentlightning.records import Dataset, Metrics, Run
from agentlightning.resources import LLM, NamedResources, Resource, read_resources
from agentlightning.run.directory import atomic_directory
from agentlightning.store.protocol import LightningStore

CHECKPOINT: Final = "checkpoint"
"""The folder of a run's directory that holds the state of its algorithm."""


class Gateway(Protocol):
    """The interface of the gateway (``LLMProxy``) for algorithms."""

    store: LightningStore | None
    """The store that records calls; the trainer sets it before ``start`` if it is None."""

    async def start(self) -> None:
        """Starts serving; does nothing if it already serves."""

    async def stop(self) -> None:
        """Stores the recorded calls, then stops serving."""

    async def flush(self) -> None:
        """Waits until every call answered so far is in the store."""

    async def pause(self) -> None:
        """Holds new calls back while weights change; calls in flight continue."""

    async def drain(self, timeout: float | None = None) -> bool:
        """Waits until no call is in flight; returns False after ``timeout`` seconds."""

    async def resume(self, weight_version: int | None = None) -> None:
        """Lets calls continue and records them with this version of the weights."""

    @property
    def model_list(self) -> Sequence[Mapping[str, Any]]:
        """The served models and backends, as ``update_model_list`` takes them."""

    def update_model_list(self, model_list: list[dict[str, Any]]) -> None:
        """Replaces the served models and backends."""

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> Resource:
        """Returns the resource through which agents call the gateway."""


def model_resources(gateway: Gateway) -> dict[str, Resource]:
    """Returns the resources through which agents call the models of a running gateway.

    A single model is called ``llm``, the default name of a run's model; several models keep their own names.
    """
    names = list(dict.fromkeys(str(entry.get("model_name", entry.get("model"))) for entry in gateway.model_list))
    return {"llm" if len(names) == 1 else name: gateway.as_resource(model=name) for name in names}


@dataclass
class RunContext:
    """The context of one run. The trainer fills it; ``Algorithm.set_*`` write to it too."""

    store: LightningStore | None = None
    run: Run = field(default_factory=Run)
    adapter: TraceAdapter[Any] | None = None
    llm_proxy: Gateway | None = None
    train_dataset: Dataset[Any] | None = None
    val_dataset: Dataset[Any] | None = None
    initial_resources: Mapping[str, Resource] | None = None
    trainer: Any = None
    """The ``Trainer`` that runs the algorithm, if one does."""
    directory: Path | None = None
    """Directory for the files of the run; None if the run keeps no files."""
    seed: int = 0
    is_resumed: bool = False
    """Whether the run continues an earlier one."""
    key: str = field(default_factory=lambda: os.urandom(16).hex())
    """Text from which the ids of this run's rollouts are derived; a resumed run keeps it."""

    _logging: list[asyncio.Task[Metrics]] = field(default_factory=list, init=False, repr=False)

    def log(self, step: int, values: Mapping[str, float]) -> asyncio.Task[Metrics] | None:
        """Stores the metrics of a step, which trackers and dashboard show; repeating a step adds and replaces values.

        In a synchronous algorithm, they are stored when ``log`` returns None; in an async one, when the task is awaited
        or the algorithm ends. ``progress`` is the share of the run that is done; it rises from 0 to 1.
        """
        assert self.store is not None, "a run has a store"
        adding = self.store.add_metrics(step, dict(values))
        try:
            task = asyncio.get_running_loop().create_task(adding)
        except RuntimeError:
            asyncio.run(adding)
            return None
        self._logging.append(task)
        return task

    async def flush(self) -> None:
        """Waits until all logged metrics are stored; raises StoreError if some could not be stored."""
        pending, self._logging = self._logging, []
        await asyncio.gather(*pending)

    def rollout_id(self, *place: str | int) -> str:
        """Returns a reproducible id for a place in this run, such as ``("train", step, task, repetition)``.

        After a resume, enqueueing the same id finds the queued, running or finished rollout instead of repeating it.
        """
        import hashlib

        text = "/".join((self.key, *map(str, place)))
        return "ro-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


T = TypeVar("T")


class Algorithm:
    """Learns from rollouts and publishes better resources.

    A subclass defines ``run``: it enqueues rollouts in the store, waits for them, reads their spans and publishes
    resources. Runners execute the rollouts; both sides communicate only through the store.

    A rollout may fail or have no reward: ``run`` goes on, or raises a LightningError with the reason if none is usable.
    When it returns, what it has learned is in the store, with all other resources.
    ``agentlightning.testing.algorithm.AlgorithmConformance`` tests an algorithm.
    """

    default_adapter: ClassVar[str | None] = None
    """Name of the adapter component that the trainer creates if the user gives none."""

    continues_from_latest: ClassVar[bool] = False
    """Whether every run starts from its store's latest resources; initial ones are then only used if there are none."""

    runs_agent: ClassVar[bool] = True
    """Whether it needs an agent; without one, ``Trainer.fit()`` starts no rollouts."""

    rollouts_at_once: ClassVar[int | None] = None
    """Default number of concurrent rollouts of all runners together; None means 16 in each runner."""

    _context: RunContext | None = None

    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> Awaitable[None] | None:
        """Trains, synchronously or as a coroutine."""
        raise ConfigError(f"{type(self).__name__} defines no run(train_dataset, val_dataset)")

    def is_async(self) -> bool:
        """Whether ``run`` is awaited; a synchronous ``run`` is called in a thread."""
        return inspect.iscoroutinefunction(self.run)

    def check_setup(self, context: RunContext) -> Sequence[LLM]:
        """Checks a run before it creates anything; a context without a store stands for a new, empty store.

        Raises ConfigError if something is missing or does not fit. Returns the endpoints that the algorithm itself
        calls, which ``agl train --dry-run`` tests.
        """
        return ()

    def print_config(self) -> str:
        """Returns the effective settings as YAML, for ``--print-config``; empty if they equal the given settings."""
        return ""

    def checkpoint(self) -> None:
        """Saves the state of the run, atomically; call it between steps. Does nothing if the run keeps no files.

        ``checkpoint`` in the run's directory is replaced when ``save_state`` has returned, so a killed process loses
        what came after the last call.
        """
        if self.context.directory is not None:
            with atomic_directory(self.context.directory / CHECKPOINT) as scratch:
                self.save_state(scratch)

    def save_state(self, directory: Path) -> None:
        """Writes the state that ``load_state`` continues from into an empty directory; ``checkpoint`` calls it."""

    def load_state(self, directory: Path) -> None:
        """Restores what ``save_state`` wrote to this directory; called before ``run`` when a run is resumed."""

    @property
    def context(self) -> RunContext:
        """The context of the run; the setters and getters below write and read it."""
        if self._context is None:
            self._context = RunContext()
        return self._context

    @context.setter
    def context(self, context: RunContext) -> None:
        self._context = context

    def set_store(self, store: LightningStore) -> None:
        self.context.store = store

    def get_store(self) -> LightningStore:
        return _given(self.context.store, "store", self)

    def set_adapter(self, adapter: TraceAdapter[Any]) -> None:
        self.context.adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        return _given(self.context.adapter, "adapter", self)

    def set_llm_proxy(self, llm_proxy: Gateway | None) -> None:
        self.context.llm_proxy = llm_proxy

    def get_llm_proxy(self) -> Gateway | None:
        return self.context.llm_proxy

    def set_initial_resources(self, resources: Mapping[str, Resource | str]) -> None:
        self.context.initial_resources = read_resources(resources)

    def get_initial_resources(self) -> NamedResources | None:
        return self.context.initial_resources

    def set_trainer(self, trainer: Any) -> None:
        self.context.trainer = trainer

    def get_trainer(self) -> Any:
        return _given(self.context.trainer, "trainer", self)


class FastAlgorithm(Algorithm):
    """An algorithm that finishes in minutes and changes nothing permanently, as ``Trainer.dev`` requires."""


def _given(value: T | None, name: str, algorithm: Algorithm) -> T:
    if value is None:
        raise ConfigError(f"{type(algorithm).__name__} has no {name}; call set_{name}(...) or run it through a Trainer")
    return value
