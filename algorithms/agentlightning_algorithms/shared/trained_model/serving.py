"""Serves a model behind an OpenAI-compatible address while a block of code runs."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentlightning.plugin.registry import get_manager
from agentlightning.resources import LLM, Resource
from agentlightning_algorithms.shared.policy_backend import PolicyBackend, PolicySetup, load_adapter
from agentlightning_algorithms.shared.trained_model.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    list_policies,
    read_base,
    readable,
)
from agentlightning_algorithms.shared.trained_model.record import TrainingRecord, read_training


@dataclass(frozen=True)
class ServedModel:
    """A model that is being served."""

    source: str
    """The model, as text for the user."""
    endpoint: str
    model: str
    backend: PolicyBackend
    record: TrainingRecord | None
    """The record of the run that trained the model."""
    policies: Sequence[str] = ()
    """Names of the policies of a run that trained several; their models and resources have the same names."""

    def resources(self) -> dict[str, Resource]:
        """Returns the resources by which agents of the run receive the model, or each of its policies."""
        if self.record is None:
            return {}
        sampling = dict(self.record.sampling)
        key = str(self.backend.model_entry.get("api_key", "none"))
        models = {name: name for name in self.policies} or {self.record.resource_name: self.model}
        return {
            name: LLM(endpoint=self.endpoint, model=model, api_key=key, sampling_parameters=sampling)
            for name, model in models.items()
        }


@contextlib.contextmanager
def open_model(source: str, checkpoint: str | None = None) -> Iterator[tuple[str, Path | str]]:
    """Yields a text for the user, and the directory or hub name of a model: a run's checkpoint, or ``source`` itself.

    Raises:
        ConfigError: the run has no such checkpoint, or ``checkpoint`` is given for a model.
    """
    run = Path(source)
    is_run = read_training(run) is not None or bool(list_checkpoints(run)) or (run / "run.json").is_file()
    if not is_run and checkpoint is None:
        yield source, source
        return
    name, found = find_checkpoint(run, checkpoint)
    with readable(found) as model:
        yield f"{source} ({name if not name.isdecimal() else f'step {name}'})", model


@contextlib.contextmanager
def serve_model(
    source: str,
    checkpoint: str | None = None,
    *,
    name: str = "policy",
    device: str | None = None,
    dtype: str | None = None,
    **settings: Any,
) -> Iterator[ServedModel]:
    """Serves the model of a run, or another model, with the policy backend ``transformers``.

    Args:
        source: the directory of a run or of a model, or a hub name.
        checkpoint: ``best``, ``latest`` or a step of the run; None: the first of best and latest.
        name: name of the model in requests.
        device: by default the device of the training, or else ``cpu``.
        dtype: by default the type of the training, or else ``float32``.
        settings: settings of the backend.

    Raises:
        ConfigError: there is no such model.
        PluginError: the backend, or a package that it needs, is not installed.
        LightningError: the server did not start.
    """
    record = read_training(Path(source))
    with contextlib.ExitStack() as stack:
        shown, model = stack.enter_context(open_model(source, checkpoint))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-serve-")))
        spec = {"name": "transformers", **settings}
        backend = cast(PolicyBackend, get_manager().create("policy_backend", spec))
        policies = list_policies(Path(model))
        setup = PolicySetup(
            model=read_base(next(iter(policies.values()))) if policies else str(model),
            model_name=name,
            directory=logs,
            device=device or (record.device if record else "cpu"),
            dtype=dtype or (record.dtype if record else "float32"),
            threads=record.settings.get("sample_threads") if record else None,
        )
        stack.callback(lambda: asyncio.run(backend.stop()))
        asyncio.run(backend.start(setup))
        for policy, path in policies.items():
            asyncio.run(load_adapter(backend, policy, path, 0))
        endpoint = str(backend.model_entry["endpoint"])
        yield ServedModel(shown, endpoint, name, backend, record, tuple(policies))
