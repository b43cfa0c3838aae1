"""Registers our rollout backend and platform; verl loads this module through the entry-point group ``verl.plugins``.

With the platform ``cpu`` (``trainer.device=cpu``), verl trains through FSDP2 and gloo, for tests and laptops.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from agentlightning_algorithms.verl.environment import check_release

if TYPE_CHECKING:
    from verl.workers.rollout.replica import RolloutReplica


def _load_replica() -> type[RolloutReplica]:
    from agentlightning_algorithms.verl.inference.replica import TransformersReplica

    return TransformersReplica


RolloutReplicaRegistry.register("transformers", _load_replica)
_ROLLOUT_REGISTRY["transformers", "async"] = "agentlightning_algorithms.verl.inference.replica.ServerAdapter"


class CPUPlatform(PlatformBase):  # type: ignore[misc] # verl's classes are untyped
    """One device, without synchronisation or memory of its own."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu  # type: ignore[no-any-return] # mypy does not read torch

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl calls tensor.to(current_device()), and 0 would be a GPU

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _nothing(self, *_: Any) -> None: ...

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = cudart = _nothing
    profiler_start = profiler_stop = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"  # start_ray declares GPUs, because verl places its workers by them

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self, device_index: int | None = None) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


def _install_cpu() -> None:
    """Registers the platform, completes ``torch.cpu``, and patches three functions of verl 0.9 that need a GPU."""
    PlatformRegistry.register(platform="cpu")(CPUPlatform)
    _complete_torch_cpu()
    check_release()  # the patches fit only the releases that it allows
    _name_gloo_once()
    _offload_without_pinning()
    _load_critics_without_flash_attention()


def _complete_torch_cpu() -> None:
    """Adds functions of device modules to ``torch.cpu``, which cannot be wrapped: verl compares it by identity."""
    nothing: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(
            ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), lambda *_, **__: 0
        ),
        "reset_peak_memory_stats": lambda *_, **__: None,
        "mem_get_info": lambda *_, **__: (0, 0),
        "empty_cache": lambda: None,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "get_device_name": lambda *_: "CPU",
    }
    for name, function in nothing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _name_gloo_once() -> None:
    """Requests the backend ``cpu:gloo``, because torch refuses verl's ``cpu:gloo,cpu:gloo``.

    https://github.com/volcengine/verl/blob/v0.9.1/verl/utils/distributed.py
    """
    import verl.utils.distributed as distributed

    initialize = distributed.initialize_global_process_group_ray

    @functools.wraps(initialize)
    def initialize_with_gloo(timeout_second: float | None = None, backend: str | None = None) -> None:
        initialize(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_with_gloo


def _offload_without_pinning() -> None:
    """Keeps verl from offloading the reference model to pinned memory, which needs an accelerator.

    https://github.com/volcengine/verl/blob/v0.9.1/verl/workers/engine/fsdp/transformer_impl.py
    """
    import verl.utils.fsdp_utils as fsdp

    fsdp.CPUOffloadPolicy = lambda **_: None


def _load_critics_without_flash_attention() -> None:
    """Loads value models without flash attention, which needs a GPU; verl uses it whatever is configured.

    https://github.com/volcengine/verl/blob/v0.9.1/verl/utils/model.py
    """
    import verl.utils.model as model
    from transformers import AutoModelForTokenClassification

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    model.load_valuehead_model = load_valuehead_model


if os.environ.get("VERL_PLATFORM") == "cpu":
    _install_cpu()
