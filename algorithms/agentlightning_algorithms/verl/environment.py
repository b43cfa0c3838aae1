"""What has to be in place before verl is imported, here and in every Ray process, and the Ray cluster itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_CPU: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # names the engine class; there is none for the CPU, and this one asks the platform
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "2",
}
_RAY: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process for each core, none of which fits verl's environment
}
_STARTS: Final = 4


def choose_platform(device: str) -> None:
    """Says which platform verl is to find when it is imported; afterwards it is too late."""
    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ.update(_CPU)


def start_ray(config: DictConfig) -> bool:
    """Connects to Ray as ``config.ray_kwargs.ray_init`` says; False when this process is connected already.

    verl's ``run_ppo`` does the same, but moves the trainer to another process, out of reach of store and gateway.

    Raises:
        ConfigError: the cluster has fewer GPUs than verl would take.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if ray.is_initialized():
        return False
    is_cpu = config.trainer.device == "cpu"
    given: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    own_environment: Any = get_ppo_ray_runtime_env  # untyped
    runtime: Any = OmegaConf.merge(own_environment(config), given.pop("runtime_env", None) or {})
    runtime = OmegaConf.to_container(runtime)
    names = {**_CPU, **_RAY} if is_cpu else _RAY
    runtime.setdefault("env_vars", {}).update({name: os.environ[name] for name in names})
    runtime["env_vars"].update({"TRANSFER_QUEUE_ENABLE": "1"})
    if is_cpu and given.get("address") is None:
        given["address"] = "local"  # not somebody else's cluster, whose GPUs would be real
        given["num_cpus"] = given.get("num_cpus") or 16  # verl's processes reserve more than they use
        given["num_gpus"] = config.trainer.n_gpus_per_node  # what verl counts workers by
        given.setdefault("include_dashboard", False)
    for start in range(1, _STARTS + 1):
        try:
            ray.init(**given, runtime_env=runtime)
        except Exception as error:  # isolation point: Ray has no type for what is told apart below
            ray.shutdown()  # a busy machine may need more than the 30 s that Ray gives its own processes
            if start == _STARTS or "timed out during startup" not in str(error):
                raise
        else:
            break
    if config.trainer.device == "cuda":
        needed = config.trainer.nnodes * config.trainer.n_gpus_per_node
        found = int(ray.cluster_resources().get("GPU", 0))
        if found < needed:
            ray.shutdown()
            raise ConfigError(
                f"verl's trainer.nnodes * trainer.n_gpus_per_node = {needed} GPUs, and Ray has {found}: "
                "ray_kwargs.ray_init.address names another cluster, trainer.device = 'cpu' needs no GPU"
            )
    return True
