"""Our defaults for verl, and the checks of a configuration that do not need verl installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from agentlightning.errors import ConfigError

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
    key: tuple[str, ...]
    value: Any
    is_unchecked: bool
    """Whether the key begins with a plus, as in Hydra."""


def flatten(value: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Setting]:
    for name, child in value.items():
        is_unchecked = str(name).startswith("+")
        key = (*path, *str(name).lstrip("+").split("."))
        if isinstance(child, Mapping) and child and not is_unchecked:
            yield from flatten(child, key)
        else:
            yield Setting(key, child, is_unchecked)


def given_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys that the user set."""
    return (".".join(setting.key) for setting in flatten(config, ()))


def default_settings(settings: list[Setting]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields our defaults for the configuration's device, by key, except those that the settings replace."""
    device = next((s.value for s in settings if s.key == ("trainer", "device")), "cuda")
    for name, value in {**DEFAULTS, **(CPU_DEFAULTS if device == "cpu" else {})}.items():
        key = tuple(name.split("."))
        if not any(given.key[: len(key)] == key or key[: len(given.key)] == given.key for given in settings):
            yield key, value


def compose_without_verl(config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys over our defaults, for a machine without verl: verl's own keys and values are unknown there.

    Raises:
        ConfigError: a key is reserved or below a key that has one value, or a value is out of range.
    """
    settings = list(flatten(config, ()))
    composed: dict[str, Any] = {}
    for key, value in (*default_settings(settings), *((setting.key, setting.value) for setting in settings)):
        check_reserved(".".join(key))
        node = composed
        for depth, part in enumerate(key[:-1], 1):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"verl's {'.'.join(key[:depth])} is one value, not a mapping")
        node[key[-1]] = dict(value) if isinstance(value, Mapping) else value

    def get(name: str) -> Any:
        node: Any = composed
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    check_values(get)
    return composed


def check_reserved(name: str) -> None:
    """Raises ConfigError for a key that the algorithm sets itself."""
    for taken, reason in _RESERVED.items():
        if name == taken or name.startswith(f"{taken}."):
            raise ConfigError(f"verl's {name} cannot be set: {reason}")


def check_values(get: Callable[[str], Any]) -> None:
    """Checks values that belong together; ``get`` returns None for an unknown key.

    Raises:
        ConfigError: a value is out of range, or two values exclude each other.
    """
    mode = get("trainer.v1.trainer_mode")
    if mode not in (None, *_MODES):
        raise ConfigError(
            f"verl's trainer.v1.trainer_mode = {mode!r}; supported: {', '.join(_MODES)}. (In verl 0.9.1 separate_async "
            "sends agents' requests to servers past the gateway.)"
        )
    if get("algorithm.adv_estimator") == "remax":
        raise ConfigError(
            "verl's algorithm.adv_estimator = 'remax' needs a greedy rollout of each task as baseline, which agents do "
            "not give; use grpo, rloo, opo, reinforce_plus_plus, reinforce_plus_plus_baseline or gae"
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
