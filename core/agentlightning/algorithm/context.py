"""``RunContext``: the store, data and services that an algorithm works with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.records import Dataset, Run
from agentlightning.resources import Resource
from agentlightning.store.protocol import LightningStore


class RunningTrainer(Protocol):
    """The settings of the ``Trainer`` that runs an algorithm."""

    n_runners: int
    max_rollouts: int | None
    max_concurrency: int
    run_dir: Path | None
    resume: bool
    seed: int


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
    trainer: RunningTrainer | None = None
    directory: Path | None = None
    """Directory for the files of the run; None if the run keeps no files."""
    seed: int = 0
    key: str = field(default_factory=lambda: os.urandom(16).hex())
    """Text from which the ids of this run's rollouts are derived; a resumed run keeps it."""

    def rollout_id(self, *place: str | int) -> str:
        """Returns a reproducible id for a place in this run, such as ``("train", step, task, repetition)``.

        After a resume, enqueueing the same id finds the queued, running or finished rollout instead of repeating it.
        """
        import hashlib

        text = "/".join((self.key, *map(str, place)))
        return "ro-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
