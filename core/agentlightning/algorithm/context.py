"""What an algorithm is given to work with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.resources import Resource
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, Run

if TYPE_CHECKING:
    from agentlightning.trainer import Trainer


class Gateway(Protocol):
    """What algorithms ask of the gateway (``LLMProxy``)."""

    store: LightningStore | None
    """Where calls are recorded; the trainer fills it in before ``start`` when it is None."""

    async def start(self) -> None:
        """Begins to serve; harmless when it does."""
        ...

    async def stop(self) -> None:
        """Stops serving, after what it recorded is stored."""
        ...

    async def flush(self) -> None:
        """Returns when every call answered so far is in the store."""
        ...

    async def pause(self) -> None:
        """Makes new calls wait while weights change; calls in flight go on."""
        ...

    async def drain(self, timeout: float | None = None) -> bool:
        """Waits until no call is in flight; False when ``timeout`` seconds were not enough."""
        ...

    async def resume(self, weight_version: int | None = None) -> None:
        """Lets calls go on; they are recorded with this version of the weights."""
        ...

    @property
    def model_list(self) -> Sequence[Mapping[str, Any]]:
        """The models and backends that it serves, as ``update_model_list`` takes them."""
        ...

    def update_model_list(self, model_list: list[dict[str, Any]]) -> None:
        """Replaces the models and backends that it serves."""
        ...

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> Resource:
        """The resource that agents call it by."""
        ...


def serve_models(gateway: Gateway, entries: Sequence[Mapping[str, Any]]) -> None:
    """Makes these entries of a model list the only backends of the models that they name; other models stay."""

    def name(entry: Mapping[str, Any]) -> Any:
        return entry.get("model_name", entry.get("model"))

    own = {name(entry) for entry in entries}
    others = [entry for entry in gateway.model_list if name(entry) not in own]
    gateway.update_model_list([dict(entry) for entry in (*entries, *others)])


@dataclass
class RunContext:
    """One run: where its rollouts and results live. The trainer fills it; ``Algorithm.set_*`` write to it too."""

    store: LightningStore | None = None
    run: Run = field(default_factory=Run)
    adapter: TraceAdapter[Any] | None = None
    llm_proxy: Gateway | None = None
    train_dataset: Dataset[Any] | None = None
    val_dataset: Dataset[Any] | None = None
    initial_resources: Mapping[str, Resource] | None = None
    trainer: Trainer | None = None
    directory: Path | None = None
    """Where the run keeps its files; None when it keeps none."""
    seed: int = 0
    key: str = field(default_factory=lambda: os.urandom(16).hex())
    """What makes the ids of this run's rollouts: the same again when the run is resumed."""

    def rollout_id(self, *place: str | int) -> str:
        """The id of the rollout at a place of this run, such as ``("train", step, task, repetition)``.

        An algorithm that enqueues with it can be killed at any time: enqueuing again after a resume finds what was
        queued, is running or has finished, instead of running it twice.
        """
        import hashlib

        text = "/".join((self.key, *map(str, place)))
        return "ro-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
