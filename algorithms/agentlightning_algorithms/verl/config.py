"""verl's configuration: the user's keys over our defaults over verl's own ``ppo_trainer``, and checks of it.

On a machine without verl, :func:`default_values` and :func:`check_values` know the given keys and our defaults only.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agentlightning.errors import ConfigError, suggest
from agentlightning_algorithms.verl.environment import check_release, choose_platform

if TYPE_CHECKING:
    from omegaconf import DictConfig

DEFAULTS: Final[Mapping[str, Any]] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 32,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 2048,
    "data.dataloader_num_workers": 0,  # an item is an index
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,  # rollouts differ in their number of rows
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
    "critic.model.path": "${actor_rollout_ref.model.path}",
    "critic.model.tokenizer_path": "${actor_rollout_ref.model.path}",
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "reward.num_workers": 0,  # agents emit their rewards themselves
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "trainer.logger": [],  # the run's trackers get every metric
    "trainer.n_gpus_per_node": 1,
    "trainer.resume_mode": "disable",  # the trainer's `resume` decides
    "trainer.project_name": "agentlightning",
    "trainer.experiment_name": "verl",
}
"""Our values where they differ from verl's, by dotted key."""

_FLOAT32: Final = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
_CPU_ENGINE: Final = {"use_torch_compile": False, "model_dtype": "fp32", "mixed_precision": _FLOAT32}
_CPU_MODEL: Final = {
    "use_remove_padding": False,  # needs flash attention
    "enable_gradient_checkpointing": False,
    "override_config.attn_implementation": "sdpa",
}
CPU_DEFAULTS: Final[Mapping[str, Any]] = {
    "actor_rollout_ref.rollout.name": "transformers",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.actor.strategy": "fsdp2",  # FSDP1 needs an accelerator
    "critic.strategy": "fsdp2",
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.ref.use_torch_compile": False,
    **{f"actor_rollout_ref.actor.fsdp_config.{name}": value for name, value in _CPU_ENGINE.items()},
    **{f"actor_rollout_ref.ref.fsdp_config.{name}": value for name, value in _CPU_ENGINE.items()},
    **{f"critic.fsdp.{name}": value for name, value in _CPU_ENGINE.items()},
    **{f"actor_rollout_ref.model.{name}": value for name, value in _CPU_MODEL.items()},
    **{f"critic.model.{name}": value for name, value in _CPU_MODEL.items()},
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "transfer_queue.backend.SimpleStorage.total_storage_size": 10_000,
}
"""Further values for ``trainer.device=cpu``."""

_RESERVED: Final = {
    "trainer.use_v1": "only the V1 trainer takes external agents",
    "data.train_files": "the tasks are the trainer's train_dataset",
    "data.val_files": "the tasks are the trainer's val_dataset",
    "data.custom_cls": "the tasks are the trainer's datasets",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "the agents are the trainer's",
}
_MODES: Final = ("sync", "colocate_async")


class Setting(NamedTuple):
    """One key that the user set."""

    key: str
    value: Any
    is_unchecked: bool
    """Whether the key begins with a plus, as in Hydra."""


def flatten(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yields the keys that the user set, with dots."""
    for name, child in value.items():
        is_unchecked = str(name).startswith("+")
        key = (*path, str(name).lstrip("+"))
        if isinstance(child, Mapping) and child and not is_unchecked:
            yield from flatten(child, key)
        else:
            yield Setting(".".join(key), child, is_unchecked)


def default_values(settings: list[Setting]) -> dict[str, Any]:
    """Returns our defaults for the configuration's device, by dotted key."""
    is_cpu = any(setting.key == "trainer.device" and setting.value == "cpu" for setting in settings)
    return {**DEFAULTS, **(CPU_DEFAULTS if is_cpu else {})}


def compose_without_verl(config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys over our defaults, by dotted key: verl's own keys and values are unknown without verl."""
    settings = list(flatten(config))
    for setting in settings:
        _check_reserved(setting.key)
    composed = {**default_values(settings), **{setting.key: setting.value for setting in settings}}
    check_values(composed.get)
    return composed


def compose_config(config: Mapping[str, Any]) -> DictConfig:
    """Composes verl's whole configuration.

    Args:
        config: nested, or with dotted keys, or both. A key that begins with ``+`` is not checked, for keys that verl
            reads but does not declare. ``model_engine`` selects the files of another engine, such as ``megatron``.

    Raises:
        ConfigError: verl has no such key, or its configuration refuses a value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_release()
    engine = [setting for setting in flatten(config) if setting.key == "model_engine"]
    settings = [setting for setting in flatten(config) if setting not in engine]
    choose_platform(next((setting.value for setting in settings if setting.key == "trainer.device"), "cuda"))
    own = _compose_own(*(f"model_engine={setting.value}" for setting in engine))
    for setting in settings:
        _check_key(own, setting)
    composed = copy.deepcopy(own)
    for key, value in (*default_values(settings).items(), *((setting.key, setting.value) for setting in settings)):
        try:
            OmegaConf.update(composed, key, value, merge=False, force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"verl's {key} = {value!r}: {error}") from error
    _pass_bypass_correction(composed)
    check_values(functools.partial(OmegaConf.select, composed))
    return composed


def dump_config(composed: DictConfig) -> str:
    """The composed configuration as YAML, with interpolations resolved."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(composed, resolve=True))


@functools.cache
def _compose_own(*overrides: str) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.initialize import get_gh_backup, restore_gh_from_backup

    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"
    backup = get_gh_backup()  # a user's script may use Hydra itself
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(f"verl's configuration cannot be composed with {', '.join(overrides)}: {error}") from error
    finally:
        restore_gh_from_backup(backup)


def _check_key(own: DictConfig, setting: Setting) -> None:
    """Checks that verl has a key: in its YAML, in the dataclass of a node, or in a mapping that verl leaves empty."""
    from omegaconf import DictConfig

    _check_reserved(setting.key)
    node: Any = own
    parts = setting.key.split(".")
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth])
        if not isinstance(node, DictConfig):
            raise ConfigError(f"verl's {where} is one value, not a mapping")
        if not node:
            return
        if part not in node:
            known = sorted({*map(str, node.keys()), *_declared(node)} - {"_target_"})
            if setting.is_unchecked or part in known:
                return
            raise ConfigError(
                f"verl's configuration has no key {'.'.join(parts[: depth + 1])!r}.{suggest(part, known)} "
                f"Keys of {where or 'the top level'}: {', '.join(known)}. "
                f"Write a key that verl reads but does not declare as '+{setting.key}'."
            )
        node = node.get(part)
        if node is None:
            return


def _declared(node: DictConfig) -> set[str]:
    """Fields of the dataclass that a node becomes; verl's YAML files omit some of them."""
    target = node.get("_target_", None)
    if not isinstance(target, str):
        return set()
    module, _, name = target.rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    return {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _pass_bypass_correction(composed: DictConfig) -> None:
    """Passes the correction on to the loss, because verl's V1 trainer does not and so ignores rejections.

    https://github.com/volcengine/verl/blob/v0.9.1/verl/trainer/ppo/rollout_corr_helper.py (``apply_bypass_mode``)
    """
    from omegaconf import open_dict

    if composed.algorithm.rollout_correction.bypass_mode:
        loss = composed.actor_rollout_ref.actor.policy_loss
        with open_dict(loss):
            loss.loss_mode = "bypass_mode"
            loss.rollout_correction = composed.algorithm.rollout_correction


def _check_reserved(key: str) -> None:
    """Raises ConfigError for a key that the algorithm sets itself."""
    for taken, reason in _RESERVED.items():
        if key == taken or key.startswith(f"{taken}."):
            raise ConfigError(f"verl's {key} cannot be set: {reason}")


def check_values(get: Callable[[str], Any]) -> None:
    """Checks values that belong together; ``get`` returns None for an unknown key."""
    mode = get("trainer.v1.trainer_mode")
    if mode not in (None, *_MODES):
        raise ConfigError(
            f"verl's trainer.v1.trainer_mode = {mode!r}; supported: {', '.join(_MODES)}. (In verl 0.9.1 separate_async "
            "sends agents' requests to servers past the gateway.)"
        )
    if get("algorithm.adv_estimator") == "remax":
        raise ConfigError(
            "verl's algorithm.adv_estimator = 'remax' needs a greedy rollout of each task as baseline, which agents do "
            "not give; use another estimator, such as grpo or rloo"
        )
    for section, switch, name in (
        ("algorithm", "use_kl_in_reward", "kl_penalty"),
        ("actor_rollout_ref.actor", "use_kl_loss", "kl_loss_type"),
    ):
        estimator = get(f"{section}.{name}")
        is_k1, needs_k1 = estimator in ("kl", "k1"), section == "algorithm"
        if get(f"{section}.{switch}") and estimator is not None and is_k1 != needs_k1:
            where, choices = ("reward", "kl (k1)") if needs_k1 else ("loss", "k2 or k3")
            raise ConfigError(
                f"verl's {section}.{name} = {estimator!r}: in the {where} the expected gradient of this estimator does "
                f"not hold the policy near the reference (arXiv:2510.01555); use {choices}"
            )
    tasks = get("data.train_batch_size")
    roles = ["actor_rollout_ref.actor", *(["critic"] if get("algorithm.adv_estimator") == "gae" else [])]
    for role in roles:
        mini = get(f"{role}.ppo_mini_batch_size")
        if mini is not None and (mini < 1 or tasks < 1 or tasks % mini):
            raise ConfigError(
                f"verl's data.train_batch_size = {tasks} is not a multiple of {role}.ppo_mini_batch_size = {mini}; "
                "their quotient is the number of optimizer steps per batch"
            )
    rollout = "actor_rollout_ref.rollout"
    for key in ("n", "val_kwargs.n"):
        n = get(f"{rollout}.{key}")
        if n is not None and n < 1:
            raise ConfigError(f"verl's {rollout}.{key} = {n}: a task needs at least one rollout")
    temperature = get(f"{rollout}.temperature")
    if temperature is not None and temperature <= 0:
        raise ConfigError(f"verl's {rollout}.temperature must be above 0: greedy rollouts are all alike")
    if get(f"{rollout}.name") == "transformers":
        for name in ("custom_chat_template", "trust_remote_code"):
            if value := get(f"actor_rollout_ref.model.{name}"):
                raise ConfigError(
                    f"verl's actor_rollout_ref.model.{name} = {value!r}: the rollout backend transformers loads "
                    "the model as it was saved; save it with its chat template, or use vllm"
                )
