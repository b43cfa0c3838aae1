"""Opens the session of a training: starts the policy backend, loads the model, and serves it through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.context import Gateway, RunContext
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Triplet
from agentlightning_algorithms.grpo.learning.teacher import Teacher
from agentlightning_algorithms.grpo.session import Session
from agentlightning_algorithms.grpo.settings.grpo import PENALTIES, GRPOSettings, distribution
from agentlightning_algorithms.grpo.settings.update import UpdateSettings
from agentlightning_algorithms.grpo.trained_policy import MODEL_NAMES, PolicySet
from agentlightning_algorithms.policy_backend import PolicyBackend, PolicySetup, serve_models

_FIXED: Final = ("min_p", *PENALTIES)
"""Parameters that a training row cannot express: they are forced even if calls choose the other parameters."""
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "stop")
"""Parameters that end an answer: they apply to calls that do not set them."""


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
        ConfigError: the model does not exist, or the checkpoint is of another model.
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
        swap_in_flight=settings.is_asynchronous,
    )
    stack.push_async_callback(backend.stop)
    # Both import torch and read the weights.
    policies, _ = await asyncio.gather(asyncio.to_thread(PolicySet.load, settings, update), backend.start(setup))
    gateway = context.llm_proxy
    if gateway is None:
        gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=store))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
    serve_models(gateway, model_entries(backend.model_entry, settings, policies))
    session = Session(settings, context, store, adapter, gateway, backend, policies, directory)
    if settings.teacher is not None:
        student = policies.first.updater.policy
        session.teacher = await asyncio.to_thread(Teacher.load, settings.teacher, student, dtype=settings.dtype)
    if resume_from is not None:
        await asyncio.to_thread(session.restore, resume_from)
    return session


def model_entries(entry: Mapping[str, Any], settings: GRPOSettings, policies: PolicySet) -> list[dict[str, Any]]:
    """Returns the entries of the gateway's model list: each policy for training and for evaluation."""
    entries = []
    for policy in policies:
        served = {"model": policy.name} if policy.name else {}
        for use, sampling in (("train", settings.sampling or {}), ("eval", settings.eval_sampling or {})):
            force = (settings.sampling or {})["force"]
            limits = {name: sampling[name] for name in _LIMITS if name in sampling}
            drawn = distribution(sampling)
            own = {
                "model_name": policy.model_names[use],
                "seed_calls": True,
                "sampling_parameters": drawn if force else {name: drawn[name] for name in _FIXED},
                "sampling_defaults": limits if force else {**drawn, **limits},
            }
            entries.append({**entry, **served, **own})
    return entries
