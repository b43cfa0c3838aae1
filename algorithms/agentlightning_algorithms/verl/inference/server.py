"""The inference server of one replica of the rollout backend ``transformers``.

Its Ray process imports neither verl nor torch and so starts at once; the model is in the policy server's process.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.shared.policy_backend import PolicyBackend, PolicySetup


class TransformersServer:
    """Serves the OpenAI API on loopback, with streaming and tool calls, from weights that verl replaces."""

    def __init__(self, *, model: str, dtype: str, max_length: int, seed: int, visible_devices: str) -> None:
        """Shares the trainer's GPU ``visible_devices``; an empty text selects the CPU.

        ``max_length`` limits the tokens of a prompt and its answer together; ``seed`` is for calls that have none.
        """
        if visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        self._folder = tempfile.TemporaryDirectory(prefix="agl-verl-engine-")
        spec = {"name": "transformers", "max_length": max_length}
        self._backend = cast(PolicyBackend, get_manager().create("policy_backend", spec))
        self._setup = PolicySetup(
            model=model,
            model_name="policy",
            directory=Path(self._folder.name),
            dtype=dtype,
            device="cuda:0" if visible_devices else "cpu",
            seed=seed,
        )
        self._version = 0

    async def launch(self) -> str:
        """Starts to serve and returns the address, as ``host:port``."""
        await self._backend.start(self._setup)
        return str(urlsplit(self._backend.model_entry["endpoint"]).netloc)

    async def load_weights(self, weights: bytes, version: int | None) -> None:
        """Loads a safetensors file; calls in flight end with the old weights. ``version`` None keeps the number."""
        self._version = self._version if version is None else version
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            file = Path(folder, "model.safetensors")
            await asyncio.to_thread(file.write_bytes, weights)
            await self._backend.load_weights(file.parent, self._version)

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing: verl makes these calls for engines that share memory with the trainer, unlike this one."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing
