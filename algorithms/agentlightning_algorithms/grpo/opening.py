"""Opens the session of a training: starts the policy backend, loads the model, and serves it through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, RunContext, serve_models
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Triplet
from agentlightning_algorithms.grpo.learning.monitor import TrainingMonitor
from agentlightning_algorithms.grpo.learning.updater import Updater
from agentlightning_algorithms.grpo.model.policy import load_policy
from agentlightning_algorithms.grpo.session import MODEL_NAMES, Session
from agentlightning_algorithms.grpo.setting import GRPOSettings, UpdateSettings, distribution
from agentlightning_algorithms.policy_backend import PolicyBackend, PolicySetup


async def open_session(
    stack: contextlib.AsyncExitStack,
    context: RunContext,
    adapter: TraceAdapter[Sequence[Triplet]],
    settings: GRPOSettings,
    update: UpdateSettings,
    resume_from: Path | None,
) -> Session:
    """Starts the policy backend, loads the model and finds or starts the gateway; ``stack`` stops what was started.

    ``resume_from`` is the checkpoint to continue from. The seed of the run is ``update.seed``.

    Raises:
        ConfigError: no such model, or a checkpoint of another one.
    """
    store = context.store
    if store is None:
        raise ConfigError("grpo has no store; run it through a Trainer")
    if settings.train_threads is not None:
        torch.set_num_threads(settings.train_threads)
    directory = context.directory
    if directory is None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-grpo-")))
    directory.mkdir(parents=True, exist_ok=True)
    backend = cast(PolicyBackend, get_manager().create("policy_backend", settings.backend))
    setup = PolicySetup(
        model=settings.model,
        model_name=MODEL_NAMES["train"],
        directory=directory,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.sample_threads,
        max_batch_size=settings.max_batch_size,
        seed=update.seed,
    )
    stack.push_async_callback(backend.stop)
    # Both import torch and read the weights.
    updater, _ = await asyncio.gather(asyncio.to_thread(_load_updater, settings, update), backend.start(setup))
    gateway = context.llm_proxy
    if gateway is None:
        gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=store))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
    serve_models(gateway, model_entries(backend.model_entry, settings))
    monitor = TrainingMonitor(is_exact=settings.dtype == "float32")
    session = Session(settings, context, store, adapter, gateway, backend, updater, directory, monitor)
    if resume_from is not None:
        session.restore(updater.load(resume_from))
    return session


def model_entries(entry: Mapping[str, Any], settings: GRPOSettings) -> list[dict[str, Any]]:
    """Returns the entries of the gateway's model list, for training and for evaluation."""
    entries = []
    for use, sampling in (("train", settings.sampling or {}), ("eval", settings.eval_sampling or {})):
        key = "sampling_parameters" if (settings.sampling or {})["force"] else "sampling_defaults"
        own = {"model_name": MODEL_NAMES[use], "seed_calls": True, key: distribution(sampling)}
        entries.append({**entry, **own})
    return entries


def _load_updater(settings: GRPOSettings, update: UpdateSettings) -> Updater:
    dtype = "float32" if settings.lora is None else settings.dtype
    policy = load_policy(settings.model, dtype=dtype, device=settings.device)
    if settings.lora is not None:
        from agentlightning_algorithms.grpo.model.lora import add_lora  # peft takes seconds to import

        torch.manual_seed(update.seed)
        add_lora(policy.model, settings.lora)
    return Updater(policy, update, autocast=settings.dtype != "float32")
