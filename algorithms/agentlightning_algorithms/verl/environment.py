"""Prepares the process for verl: its release, its platform, and the Ray cluster."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from packaging.specifiers import SpecifierSet

from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SUPPORTED: Final = ">=0.9.1,<0.10"
"""The V1 trainer, which is subclassed here, changes between minor releases."""
_CPU: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # selects the engine class; the CPU has none, and this one works on it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "2",
}
_RAY: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # prestarted workers would not have verl's environment
}
_START_ATTEMPTS: Final = 4


def check_release() -> None:
    """Checks the installed release of verl.

    Raises:
        ConfigError: verl is not installed, or its release is not supported.
    """
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"verl is not installed; the algorithm verl needs verl{SUPPORTED} in an environment of its own: "
            "pip install 'lightning[verl]' from a checkout, as in pip install '.[verl]'"
        ) from None
    if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        raise ConfigError(f"verl {installed} is installed; supported is verl{SUPPORTED}")


def choose_platform(device: str) -> None:
    """Selects verl's platform; has no effect once verl is imported."""
    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ.update(_CPU)


def start_ray(config: DictConfig) -> bool:
    """Connects to Ray with ``config.ray_kwargs.ray_init``; returns False if this process is already connected.

    verl's ``run_ppo`` does the same, but moves the trainer to another process, which cannot reach store and gateway.

    Raises:
        ConfigError: the cluster has fewer GPUs than verl needs.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if ray.is_initialized():
        return False
    is_cpu = config.trainer.device == "cpu"
    given: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    get_runtime_env: Any = get_ppo_ray_runtime_env  # untyped
    runtime: Any = OmegaConf.merge(get_runtime_env(config), given.pop("runtime_env", None) or {})
    runtime = OmegaConf.to_container(runtime)
    names = {**_CPU, **_RAY} if is_cpu else _RAY
    runtime.setdefault("env_vars", {}).update({name: os.environ[name] for name in names})
    runtime["env_vars"].update({"TRANSFER_QUEUE_ENABLE": "1"})
    if is_cpu and given.get("address") is None:
        given["address"] = "local"  # not an existing cluster, whose GPUs would be real
        given["num_cpus"] = given.get("num_cpus") or 16  # verl's processes reserve more than they use
        given["num_gpus"] = config.trainer.n_gpus_per_node  # verl counts workers by GPUs
        given.setdefault("include_dashboard", False)
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            ray.init(**given, runtime_env=runtime)
        except Exception as error:  # isolation point: Ray has no type for this timeout
            ray.shutdown()  # a busy machine may need more than the 30 s that Ray gives its own processes
            if attempt == _START_ATTEMPTS or "timed out during startup" not in str(error):
                raise
        else:
            break
    if config.trainer.device == "cuda":
        needed = config.trainer.nnodes * config.trainer.n_gpus_per_node
        found = int(ray.cluster_resources().get("GPU", 0))
        if found < needed:
            ray.shutdown()
            raise ConfigError(
                f"verl's trainer.nnodes * trainer.n_gpus_per_node = {needed} GPUs, but Ray has {found}: set "
                "ray_kwargs.ray_init.address to another cluster, or trainer.device to 'cpu'"
            )
    return True
