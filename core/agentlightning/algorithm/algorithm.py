"""The base class of algorithms."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, RunContext, RunningTrainer
from agentlightning.errors import ConfigError
from agentlightning.records import Dataset
from agentlightning.resources import LLM, NamedResources, Resource, read_resources
from agentlightning.store.protocol import LightningStore

T = TypeVar("T")


class Algorithm:
    """Learns from rollouts and publishes better resources.

    A subclass defines ``run``: it enqueues rollouts in the store, waits for them, reads their spans and publishes
    resources. Runners execute the rollouts; both sides communicate only through the store.
    """

    default_adapter: ClassVar[str | None] = None
    """Name of the adapter component that the trainer creates if the user gives none."""

    continues_from_latest: ClassVar[bool] = False
    """Whether every run starts from its store's latest resources; initial ones are then only used if there are none."""

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

    def save_state(self, directory: Path) -> None:
        """Writes the state that ``load_state`` continues from; called between steps."""

    def load_state(self, directory: Path) -> None:
        """Restores the state that ``save_state`` wrote."""

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

    def set_trainer(self, trainer: RunningTrainer) -> None:
        self.context.trainer = trainer

    def get_trainer(self) -> RunningTrainer:
        return _given(self.context.trainer, "trainer", self)


class FastAlgorithm(Algorithm):
    """An algorithm that finishes in minutes and changes nothing permanently, as ``Trainer.dev`` requires."""


def _given(value: T | None, name: str, algorithm: Algorithm) -> T:
    if value is None:
        raise ConfigError(f"{type(algorithm).__name__} has no {name}; call set_{name}(...) or run it through a Trainer")
    return value
