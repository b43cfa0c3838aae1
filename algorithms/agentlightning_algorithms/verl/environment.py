"""Prepares the process for verl: its release, its platform, and the Ray cluster."""

from __future__ import annotations

import importlib.util
import math
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.specifiers import SpecifierSet

from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SUPPORTED: Final = ">=0.9.1,<0.10"
"""The V1 trainer, which is subclassed here, changes between minor releases."""
_CPU: Final = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # selects the engine class; this one also works on a CPU, which has none
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several processes share the cores
    "VLLM_NO_USAGE_STATS": "1",
}
_RAY: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # prestarted workers would not have verl's environment
}


def check_release() -> None:
    """Checks the installed release of verl."""
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"verl is not installed; the algorithm needs verl{SUPPORTED} in an environment of its own: pip install "
            "'.[verl]' in a checkout of Lightning"
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
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    from agentlightning_plugins.shared.processes.ray_start import start_patiently

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
        given.setdefault("num_gpus", config.trainer.n_gpus_per_node)  # verl counts workers by GPUs
        given.setdefault("include_dashboard", False)
    start_patiently(lambda: ray.init(**given, runtime_env=runtime))
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


_PACKAGES: Final = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Packages of verl's own inference engines."""
_PARALLEL: Final = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def check_run(config: DictConfig) -> None:
    """Finds errors that verl would find only after its workers have started. Imports verl, which takes seconds."""
    from hydra.errors import InstantiationException
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    has_critic = need_critic(config)
    _check_engine(config)
    _check_model(config, "actor_rollout_ref")
    if has_critic:
        _check_model(config, "critic")
    try:
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=has_critic)
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        get_adv_estimator_fn(config.algorithm.adv_estimator)
    except InstantiationException as error:  # Hydra wraps the error of a dataclass
        raise ConfigError(f"verl refuses its configuration: {error.__cause__ or error}") from error
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"verl refuses its configuration: {error}") from error


def _check_engine(config: DictConfig) -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    rollout = config.actor_rollout_ref.rollout
    known = sorted(name for name, mode in _ROLLOUT_REGISTRY if mode == rollout.mode)
    if rollout.name not in known:
        raise ConfigError(f"verl's actor_rollout_ref.rollout.name = {rollout.name!r}; one of: {', '.join(known)}")
    package = _PACKAGES.get(rollout.name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"verl's actor_rollout_ref.rollout.name = {rollout.name!r}, and {package} is not installed: install it as "
            "verl's documentation says for your CUDA, or use 'transformers'. Without a GPU set trainer.device to 'cpu'"
        )
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    of_replica = math.prod(rollout[name] for name in _PARALLEL)
    if gpus % of_replica:
        raise ConfigError(
            f"verl's trainer.nnodes * trainer.n_gpus_per_node = {gpus} GPUs are not a multiple of the {of_replica} "
            f"GPUs of a replica: the product of {', '.join(_PARALLEL)} in actor_rollout_ref.rollout"
        )


def _check_model(config: DictConfig, role: str) -> None:
    from transformers import AutoConfig

    model = config[role].model
    if "://" in model.path:
        return  # verl fetches it
    if model.path.startswith((".", "/", "~")) and not Path(model.path).is_dir():
        raise ConfigError(f"verl's {role}.model.path = {model.path!r} is not a folder; ~ is not expanded")
    try:
        AutoConfig.from_pretrained(model.path, trust_remote_code=model.get("trust_remote_code", False))
    except (OSError, ValueError) as error:
        raise ConfigError(f"verl's {role}.model.path = {model.path!r}: {error}") from error
