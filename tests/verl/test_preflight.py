"""Errors that are found before Ray starts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_algorithms.verl.config import compose_config
from agentlightning_algorithms.verl.environment import check_run

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's imports


def compose(model: Path, config: dict[str, Any]) -> Any:
    importlib.import_module("agentlightning_algorithms.verl.registration")  # verl's plugins fail to load under pytest
    rollout = {"actor_rollout_ref.rollout.name": "transformers"}
    return compose_config({"actor_rollout_ref.model.path": str(model), **rollout, **config})


def test_a_complete_configuration_passes(model: Path) -> None:
    check_run(compose(model, {"trainer.n_gpus_per_node": 4, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actor_rollout_ref.model.path": "/no/such"}, "actor_rollout_ref.model.path = '/no/such' is not a folder"),
        ({"actor_rollout_ref.model.path": "no such name"}, "actor_rollout_ref.model.path = 'no such name': "),
        ({"algorithm.adv_estimator": "gae", "critic.model.path": "./no"}, "critic.model.path = './no' is not a folder"),
        ({"actor_rollout_ref.rollout.name": "vllm"}, "'vllm', and vllm is not installed"),
        ({"actor_rollout_ref.rollout.name": "hf"}, "rollout.name = 'hf'; one of: sglang, transformers, trtllm, vllm"),
        (
            {"trainer.n_gpus_per_node": 3, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2},
            "3 GPUs are not a multiple of the 2 GPUs of a replica",
        ),
        ({"algorithm.adv_estimator": "grop"}, "verl refuses its configuration: Unknown advantage estimator"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "ppoo"}, "Unsupported loss mode: ppoo"),
        ({"actor_rollout_ref.actor.loss_agg_mode": "mean"}, "Invalid loss_agg_mode: mean"),
    ],
)
def test_the_error_about_an_impossible_run_names_the_wrong_setting(
    model: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(agl.ConfigError, match=re.escape(message)):
        check_run(compose(model, config))
