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

_MERGE: Final = "actor_rollout_ref.model.lora.merge"
_DYNAMIC: Final = "actor_rollout_ref.actor.use_dynamic_bsz"
DEFAULTS: Final[Mapping[str, Any]] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 32,
    "data.max_prompt_length": 4096,
    "data.max_response_length": 2048,
    "data.dataloader_num_workers": 0,  # an item is an index
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    _DYNAMIC: True,  # rollouts differ in their number of rows
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    _MERGE: True,
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
_VLLM_ON_CPU: Final[Mapping[str, Any]] = {
    f"actor_rollout_ref.rollout.{name}": value
    for name, value in {
        "enforce_eager": True,
        "enable_sleep_mode": False,  # vLLM has none on a CPU
        "free_cache_engine": False,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "checkpoint_engine.update_weights_bucket_megabytes": 64,
        "engine_kwargs.vllm.worker_extension_cls": (
            "agentlightning_algorithms.verl.inference.vllm_extension.ReloadingExtension"
        ),
        "engine_kwargs.vllm.kv_cache_memory_bytes": 256 << 20,
    }.items()
}
"""Further values for ``trainer.device=cpu`` with ``rollout.name=vllm``."""

_ROLLOUT: Final = "actor_rollout_ref.rollout"
REFUSED: Final[Mapping[str, str]] = {
    key: reason
    for reason, keys in {
        "the tasks are the trainer's train_dataset and val_dataset": """
            data.train_files data.val_files data.custom_cls data.train_max_samples data.val_max_samples data.use_shm
            data.prompt_key data.reward_fn_key data.image_key data.video_key data.audio_key data.image_patch_size
            data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.return_multi_modal_inputs
            data.tokenizer data.trust_remote_code""",
        "a prompt of more than data.max_prompt_length tokens is dropped and counted (dropped/prompt_too_long)": """
            data.truncation data.filter_overlong_prompts data.filter_overlong_prompts_workers""",
        "the agents are the trainer's, and they choose messages, tools and turns": f"""
            data.tool_config_path data.function_tool_path data.apply_chat_template_kwargs {_ROLLOUT}.agent
            {_ROLLOUT}.multi_turn {_ROLLOUT}.ignore_eos""",
        "agents emit their rewards, or the trainer's `reward` makes them": """
            reward reward_model custom_reward_function sandbox_fusion""",
        "temperature, top_p and top_k decide; greedy is temperature 0, in val_kwargs": f"""
            {_ROLLOUT}.do_sample {_ROLLOUT}.val_kwargs.do_sample""",
        "every call is a span of the run's store": f"{_ROLLOUT}.trace skip",
        "it is for separate_async, whose servers bypass the gateway": f"""
            trainer.v1.separate_async actor_rollout_ref.hybrid_engine {_ROLLOUT}.nnodes {_ROLLOUT}.n_gpus_per_node""",
        "verl's V1 trainer, which alone takes external agents, does not read it": f"""
            trainer.use_v1 trainer.balance_batch trainer.esi_redundant_time trainer.ray_wait_register_center_timeout
            algorithm.filter_groups.max_num_gen_batches {_ROLLOUT}.over_sample_rate {_ROLLOUT}.multi_stage_wake_up""",
        "verl's V1 trainer would give rows the advantages of others": "algorithm.use_pf_ppo algorithm.pf_ppo",
        "it is deprecated, and not read where micro batches are sized by tokens; use ..._micro_batch_size_per_gpu": f"""
            actor_rollout_ref.actor.ppo_micro_batch_size critic.ppo_micro_batch_size critic.forward_micro_batch_size
            actor_rollout_ref.ref.log_prob_micro_batch_size {_ROLLOUT}.log_prob_micro_batch_size""",
        "it belongs to verl's own entry point, and the algorithm has another": """
            ray_kwargs.timeline_json_file transfer_queue.enable
            global_profiler.global_tool_config.nsys.controller_nsight_options""",
    }.items()
    for key in keys.split()
}
"""Keys of verl that have no effect here, with the reason; a key stands for all keys below it, too."""
_NOT_OF_TRANSFORMERS: Final = tuple(
    f"{_ROLLOUT}.{name}"
    for name in """
        gpu_memory_utilization enforce_eager cudagraph_capture_sizes pipeline_model_parallel_size expert_parallel_size
        max_num_batched_tokens max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode scheduling_policy
        disable_log_stats engine_kwargs quantization router_config_path disaggregation prometheus mtp profiler
        free_cache_engine        skip_tokenizer_init full_determinism
    """.split()
)
"""Beginnings of keys of ``rollout`` that the rollout backend ``transformers`` does not read."""
_BY_TOKENS: Final = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
"""Ends of the keys that size micro batches with ``use_dynamic_bsz``, and without it."""
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
    given = {setting.key: setting.value for setting in settings}
    defaults = dict(DEFAULTS)
    if any(key.endswith(_BY_TOKENS[1]) for key in given):
        defaults[_DYNAMIC] = False
    is_on_cpu = given.get("trainer.device") == "cpu"
    defaults |= CPU_DEFAULTS if is_on_cpu else {}
    engine = given.get(f"{_ROLLOUT}.name", defaults[f"{_ROLLOUT}.name"])
    defaults[_MERGE] = engine != "transformers"  # which merges without rounding
    return {**defaults, **(_VLLM_ON_CPU if is_on_cpu and engine == "vllm" else {})}


def compose_without_verl(config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's keys over our defaults, by dotted key: verl's own keys and values are unknown without verl."""
    settings = list(flatten(config))
    values = default_values(settings)
    check_given(settings, values)
    composed = {**values, **{setting.key: setting.value for setting in settings}}
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
    values = default_values(settings)
    check_given(settings, values)
    for setting in settings:
        _check_key(own, setting)
    composed = copy.deepcopy(own)
    for key, value in (*values.items(), *((setting.key, setting.value) for setting in settings)):
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


def check_given(settings: list[Setting], defaults: Mapping[str, Any]) -> None:
    """Raises ConfigError for a given key that has no effect, with the reason."""
    given = {setting.key: setting.value for setting in settings}
    values = {**defaults, **given}
    for key in given:
        section, _, name = key.rpartition(".")
        for taken, reason in REFUSED.items():
            if key == taken or key.startswith(f"{taken}."):
                raise ConfigError(f"verl's {key} cannot be set: {reason}")
        if values[f"{_ROLLOUT}.name"] == "transformers" and key.startswith(_NOT_OF_TRANSFORMERS):
            raise ConfigError(f"verl's {key} cannot be set: the rollout backend transformers does not read it")
        switch = next((key for key in given if key.startswith(section) and key.endswith("use_dynamic_bsz")), _DYNAMIC)
        used, unused = _BY_TOKENS if values[switch] else reversed(_BY_TOKENS)
        if name.endswith(unused):
            raise ConfigError(
                f"verl's {key} cannot be set: {switch} = {values[switch]}, so that micro batches are sized by "
                f"...{used}; give one of the two"
            )


def check_values(get: Callable[[str], Any]) -> None:
    """Checks values that belong together; ``get`` returns None for an unknown key."""
    mode = get("trainer.v1.trainer_mode")
    if mode not in (None, *_MODES):
        raise ConfigError(
            f"verl's trainer.v1.trainer_mode = {mode!r}; supported: {', '.join(_MODES)}. (In verl 0.9.1 separate_async "
            "sends agents' requests to servers past the gateway.)"
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
    has_adapter = any(get(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank"))
    if has_adapter and get(f"{rollout}.name") != "transformers" and not get(_MERGE):
        raise ConfigError(
            f"verl's {_MERGE} = {get(_MERGE)}: agents would sample from the model without its adapter, because verl "
            "does not offer the adapter at the endpoint of its inference engine; leave the key out"
        )
    if get(f"{rollout}.name") == "transformers":
        for name in ("custom_chat_template", "trust_remote_code"):
            if value := get(f"actor_rollout_ref.model.{name}"):
                raise ConfigError(
                    f"verl's actor_rollout_ref.model.{name} = {value!r}: the rollout backend transformers loads "
                    "the model as it was saved; save it with its chat template, or use vllm"
                )
