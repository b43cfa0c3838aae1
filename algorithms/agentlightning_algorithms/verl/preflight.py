"""Checks that need no Ray cluster, so that a wrong configuration fails early."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_PACKAGES: Final = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Packages of verl's own inference engines."""
_PARALLEL: Final = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def check_run(config: DictConfig) -> None:
    """Finds errors that verl would find only after its workers have started. Imports verl, which takes seconds.

    Raises:
        ConfigError: the inference engine is not installed, the GPUs cannot be divided among its replicas, the model
            does not exist, or verl's own check refuses the configuration.
    """
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
