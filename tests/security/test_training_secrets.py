"""Keys and passwords in the settings of a training do not get into files of its run and its exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning_algorithms.grpo.algorithm import write_record
from agentlightning_algorithms.grpo.command import write_model_card
from agentlightning_algorithms.grpo.settings import GRPOSettings, TeacherSettings
from agentlightning_algorithms.offline.training import SFT
from agentlightning_algorithms.shared.trained_model import TrainingRecord
from agentlightning_plugins.demo.training import CHECKPOINT


def describe_grpo(run: Path) -> None:
    teacher = TeacherSettings(model="big", endpoint="http://me:hunter2@host/v1", api_key="hunter2")
    backend = {"name": "vllm", "endpoint": "http://host/v1", "api_key": "hunter2"}
    write_record(run, GRPOSettings(model=str(CHECKPOINT), teacher=teacher, backend=backend), [1], None)


def describe_sft(run: Path) -> None:
    SFT(model=str(CHECKPOINT), source="postgresql://me:hunter2@host/agl")._describe(1).write(run)


VERL = "actor_rollout_ref.rollout"


def describe_verl(run: Path) -> None:
    variables = {"HF_TOKEN": "hunter2", "OPENAI_API_KEY": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2", "LOG": "info"}
    settings = {
        f"+{VERL}.engine_kwargs.vllm.api_key": "hunter2",
        "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY": "hunter2",
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": variables}}},
        "reward": {"headers": {"Authorization": "Bearer hunter2", "x-api-key": "hunter2", "Accept": "text/plain"}},
        f"{VERL}.max_tokens": 64,
        "data": {"tokenizer": {"pad_token": "<pad>"}},
    }
    TrainingRecord(algorithm="verl", base=str(CHECKPOINT), settings=settings).write(run)


@pytest.mark.parametrize(
    ("describe", "kept"),
    [
        (describe_grpo, {"backend": {"name": "vllm", "endpoint": "http://host/v1", "api_key": "***"}}),
        (describe_sft, {"source": "postgresql://***@host/agl", "lora": None}),
        (
            describe_verl,
            {
                f"+{VERL}.engine_kwargs.vllm.api_key": "***",
                "reward": {"headers": {"Authorization": "***", "x-api-key": "***", "Accept": "text/plain"}},
                f"{VERL}.max_tokens": 64,
                "data": {"tokenizer": {"pad_token": "<pad>"}},
            },
        ),
    ],
)
def test_the_record_and_the_card_of_a_trained_model_contain_no_key_or_password(
    tmp_path: Path, describe: Any, kept: dict[str, Any]
) -> None:
    describe(tmp_path)
    write_model_card(tmp_path, tmp_path, "best")
    assert "hunter2" not in (tmp_path / "training.json").read_text() + (tmp_path / "README.md").read_text()
    settings = json.loads((tmp_path / "training.json").read_text())["settings"]
    assert {name: settings[name] for name in kept} == kept
