"""The rollout backend ``transformers`` as verl uses it: a replica, and the adapter that sends it weights.

Each replica is a Ray actor with a policy server; the adapter in verl's training process sends it weights through Ray.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import ray
import torch
from safetensors.torch import save
from verl.utils.device import get_visible_devices_keyword
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from agentlightning.errors import ConfigError
from agentlightning_algorithms.verl.inference.server import TransformersServer

_NAME: Final = "agentlightning_replica_{rank}"


class TransformersReplica(RolloutReplica):  # type: ignore[misc] # verl's classes are untyped
    """Launches the server of a replica."""

    async def launch_servers(self) -> None:
        options = {"name": _NAME.format(rank=self.replica_rank), "num_cpus": 0.1, "max_concurrency": 256}
        server: Any = ray.remote(TransformersServer).options(**options)
        handle = server.remote(
            model=self.model_config.path,
            dtype=self.config.dtype,
            max_length=self.config.max_model_len or self.config.prompt_length + self.config.response_length,
            seed=self.config.seed + self.replica_rank,
            visible_devices=await self.workers[0].__ray_call__.remote(_visible_devices),
        )
        self.servers = [handle]
        self._server_handle, self._server_address = handle, await handle.launch.remote()


def _visible_devices(_: Any) -> str:
    """Returns the GPUs of the process that runs this function; empty if it has none."""
    return os.environ.get(get_visible_devices_keyword(), "") if torch.cuda.is_available() else ""


class ServerAdapter(BaseRollout):  # type: ignore[misc] # verl's classes are untyped
    """Sends weights from verl's training process to the replica's server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ.get("RANK", "0"))
        per_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = replica_rank if replica_rank >= 0 else rank // per_replica
        self.is_leader_rank = rank % per_replica == 0
        self._base: dict[str, torch.Tensor] | None = None
        """The base weights of a LoRA adapter, which verl sends once."""

    async def resume(self, tags: list[str]) -> None:
        """The server shares no memory with the trainer."""

    async def release(self) -> None:
        """The server shares no memory with the trainer."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        **_: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ConfigError(
                f"checkpoint_engine sends {wire_format!r}; the rollout backend transformers takes whole tensors; leave "
                "actor_rollout_ref.rollout.checkpoint_engine.backend at naive"
            )
        # Every rank iterates, because sharded tensors are gathered on the way.
        if isinstance(weights, AsyncIterator):
            own = {name: _copy(tensor) async for name, tensor in weights}
        else:
            own = {name: _copy(tensor) for name, tensor in weights}
        if not self.is_leader_rank:
            return
        if peft_config is not None:
            if not base_sync_done:
                self._base = own
                return
            if self._base is None:
                raise ConfigError("LoRA needs actor_rollout_ref.rollout.load_format = 'dummy', verl's own value")
            own = merge_adapter(self._base, own, peft_config)
        server = ray.get_actor(_NAME.format(rank=self.replica_rank))
        file = await asyncio.to_thread(save, own)
        await server.load_weights.remote(ray.put(file), global_steps)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor, because the next one may be written to the same memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


_UNSUPPORTED: Final = "alpha_pattern fan_in_fan_out lora_bias modules_to_save target_parameters use_dora".split()
"""peft's settings that make an adapter more than two matrices and one scale."""


def merge_adapter(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Computes W + s B A of Hu et al. 2021, arXiv:2106.09685, section 4.1; ``base`` is not changed.

    ``.base_layer``, which peft adds to names, is removed. The matrices A (r, in) and B (out, r) have peft's names.
    """
    if unsupported := [name for name in _UNSUPPORTED if config.get(name)]:
        raise ConfigError(
            f"the rollout backend transformers cannot merge a LoRA adapter with {', '.join(unsupported)}: set "
            "actor_rollout_ref.model.lora.merge to true, so that verl merges it"
        )
    merged = {name.replace(".base_layer.", "."): weight for name, weight in base.items()}
    for name, down in adapter.items():
        module, mark, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if not mark:
            continue  # B, which is read together with its A
        up = adapter[name.replace(".lora_A.", ".lora_B.")]
        weight = merged.get(f"{module}.weight")
        if weight is None:
            raise ConfigError(f"the LoRA adapter is for {module}.weight, which is not among the weights of the model")
        rank = down.shape[0]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        merged[f"{module}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
    return merged
