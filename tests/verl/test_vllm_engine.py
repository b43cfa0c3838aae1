"""Trainings in which verl's own vLLM samples, on a CPU: ``trainer.device=cpu`` with ``rollout.name=vllm``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import HERE, job, read, run, save_tiny_model, task

if TYPE_CHECKING:
    from conftest import Training

pytestmark = [pytest.mark.environment("verl-vllm"), pytest.mark.slow]
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
PATIENCE_S = 3600.0
"""A training takes minutes, and more beside other work."""
VLLM = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "data.train_batch_size": 4,
    f"{ENGINE}.enable_auto_tool_choice": True,
    f"{ENGINE}.tool_call_parser": "hermes",
}


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 dimensions, which vLLM's attention on a CPU needs."""
    directory = tmp_path_factory.mktemp("verl-wide-model")
    save_tiny_model(directory, hidden_size=128, tie_word_embeddings=False, initializer_range=0.1)
    return directory


@pytest.fixture(scope="session")
def sampled_by_vllm(tmp_path_factory: pytest.TempPathFactory, wide_model: Path) -> Training:
    """Three steps; after the second one the sampler does not get the new weights."""
    directory = tmp_path_factory.mktemp("verl-vllm") / "grpo"
    train = [
        *(task("tool", "say a", 3), task("stream", "say b"), task("fresh", "say c", 2), task("stream", "say d", 2)),
        *(task("tool", "say e", 2), task("crash", "say f"), task("tool", "say g"), task("nothing", "say h")),
    ]
    config = {
        **VLLM,
        f"{ENGINE}.worker_extension_cls": "forgetful_extension.ForgetfulExtension",
        "trainer": {"total_training_steps": 3, "test_freq": 3, "val_before_train": True},
    }
    log = directory.with_suffix(".log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))  # of the process in which vLLM's worker runs
        common = {"val": [task("tool", "say x", 2)], "settings": {"rows": "trajectories"}}
        run([job(directory, wide_model, train, config, **common)], log, timeout_s=PATIENCE_S)
    return read(directory, log)


def gaps(training: Training, step: int) -> list[float]:
    """Returns the differences between the log-probabilities of sampler and trainer, of each token of a step."""
    return [
        abs(sampled - own)
        for row in training.rows
        if row["step"] == step and not row["padding"]
        for sampled, own, is_sampled in zip(
            row["rollout_log_probs"], row["old_log_probs"], row["response_mask"], strict=True
        )
        if is_sampled
    ]


def test_sampler_and_trainer_agree_as_long_as_weights_are_transferred(sampled_by_vllm: Training) -> None:
    for step in (1, 2):
        assert len(gaps(sampled_by_vllm, step)) > 50
        assert max(gaps(sampled_by_vllm, step)) < 1e-4
    assert max(gaps(sampled_by_vllm, 3)) > 1e-2, "the weights of the second step did not arrive"


def test_vllm_serves_the_groups_of_a_step_and_validation(sampled_by_vllm: Training) -> None:
    for step in (1, 2, 3):
        metrics = sampled_by_vllm.metrics[step]
        assert metrics["rollouts"] == 16
        assert metrics["optimizer_steps"] == 2
        assert metrics["actor/grad_norm"] > 0
    greedy = [rollout for rollout in sampled_by_vllm.rollouts if rollout.mode == "val"]
    assert {rollout.metadata["step"] for rollout in greedy} == {0, 3}
    assert all(rollout.status == "succeeded" for rollout in greedy)
    assert sampled_by_vllm.metrics[3]["val_rollouts"] == 1


def test_a_conversation_that_vllm_tokenizes_again_gives_more_rows_each_with_an_explanation(
    sampled_by_vllm: Training,
) -> None:
    """vLLM makes the tokens of a prompt from its text; sampled bytes that are no text become other tokens."""
    metrics = sampled_by_vllm.metrics[1]
    mismatches = {name: value for name, value in metrics.items() if name.startswith("mismatches/")}
    assert mismatches["mismatches/retokenisation"] > 0
    assert metrics["calls"] == 4 * (3 + 1 + 2 + 2)
    continuing = 4 * (2 + 0 + 0 + 1)  # of each rollout; a fresh agent continues nothing
    assert metrics["rows"] == metrics["calls"] - continuing + sum(mismatches.values())
