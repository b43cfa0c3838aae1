"""verl's configuration as users write it."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import pytest
import yaml

import agentlightning as agl
from agentlightning_algorithms.verl import release
from agentlightning_algorithms.verl.config import DEFAULTS, compose_config, dump_config


def test_ours_stand_over_verls_and_the_users_over_both() -> None:
    composed = compose_config({"data": {"train_batch_size": 64}, "algorithm.gamma": 0.9})
    assert composed.data.train_batch_size == 64
    assert composed.algorithm.gamma == 0.9
    assert composed.algorithm.adv_estimator == "grpo"  # ours; verl's is gae
    assert composed.algorithm.lam == 1.0  # verl's


def test_the_contracts_defaults_hold() -> None:
    composed = compose_config({})
    actor, model = composed.actor_rollout_ref.actor, composed.actor_rollout_ref.model
    assert composed.algorithm.adv_estimator == "grpo"
    assert composed.algorithm.use_kl_in_reward is False
    assert (composed.data.train_batch_size, composed.data.max_prompt_length) == (32, 4096)
    assert composed.data.max_response_length == 2048
    assert (actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (32, 4)
    assert (actor.optim.lr, actor.use_kl_loss, actor.entropy_coeff) == (1e-6, False, 0)
    assert model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert model.use_remove_padding is model.enable_gradient_checkpointing is True


def test_every_default_of_ours_is_a_key_of_verls() -> None:
    for name, value in DEFAULTS.items():
        compose_config({name: value})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"algorithm": {"adv_estimater": "grpo"}}, "'algorithm.adv_estimater'. Did you mean 'adv_estimator'?"),
        ({"algoritm": {"gamma": 1}}, "'algoritm'. Did you mean 'algorithm'?"),
        ({"actor_rollout_ref.actor.optim.learning": 1}, "'actor_rollout_ref.actor.optim.learning'"),
        ({"trainer": {"device": {"name": "cpu"}}}, "trainer.device is one value, not a mapping"),
        ({"data.train_files": "x.parquet"}, "data.train_files is not yours to set: the tasks are the trainer's"),
        ({"trainer.v1.trainer_mode": "separate_async"}, "supported: sync, colocate_async"),
        ({"data.train_batch_size": 33}, "train_batch_size = 33 is no multiple"),
        ({"actor_rollout_ref.rollout.temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_a_wrong_key_or_value_says_what_is_right(config: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.ConfigError, match=re.escape(message)):
        compose_config(config)


def test_mappings_that_verl_leaves_open_take_any_key() -> None:
    key = "actor_rollout_ref.model.override_config"
    composed = compose_config({key: {"rope": {"factor": 2}}, "actor_rollout_ref.rollout.engine_kwargs.vllm": {"a": 1}})
    assert composed.actor_rollout_ref.model.override_config.rope.factor == 2
    assert composed.actor_rollout_ref.rollout.engine_kwargs.vllm.a == 1


def test_a_field_that_only_verls_dataclass_has_is_known() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
    composed = compose_config({key: {"param_dtype": "bf16"}})
    assert composed.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "bf16"


def test_a_plus_adds_a_key_unchecked() -> None:
    assert compose_config({"+trainer.mine": 1}).trainer.mine == 1


def test_the_composed_configuration_can_be_printed() -> None:
    printed = yaml.safe_load(agl.VERL({"data.max_response_length": 99}).print_config())
    assert printed["actor_rollout_ref"]["rollout"]["response_length"] == 99  # a reference, filled in
    assert dump_config(compose_config({})) == dump_config(compose_config({}))


def test_a_verl_that_is_not_supported_says_which_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.8.2")
    with pytest.raises(
        agl.ConfigError, match=re.escape(f"verl 0.8.2 is installed; supported is verl{release.SUPPORTED}")
    ):
        compose_config({})


@pytest.mark.parametrize("settings", [{"rows": "rollout"}, {"rollout_timeout_s": 0}, {"drain_timeout_s": -1}])
def test_settings_of_ours_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(agl.ConfigError, match=next(iter(settings))):
        agl.VERL({}, **settings)
