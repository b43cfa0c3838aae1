"""A longer training, in which the reward rises."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from conftest import job, read, run, task

pytestmark = pytest.mark.soak
STEPS = 10


def test_the_reward_of_a_tool_agent_rises_by_at_least_0_2(tmp_path: Path, model: Path) -> None:
    """The task is to write ASCII characters, as half of all random bytes are."""
    directory = tmp_path / "learning"
    tasks = [task("tool", f"say {letter}", 1 + number % 3) for number, letter in enumerate("abcdefgh")]
    config = {
        "trainer.total_training_steps": STEPS,
        "data.train_batch_size": 8,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    }
    log = directory.with_suffix(".log")
    run([job(directory, model, tasks, config)], log, timeout_s=3000.0)
    training = read(directory, log)
    rewards = [training.metrics[step]["reward"] for step in range(1, STEPS + 1)]
    assert statistics.fmean(rewards[-3:]) - statistics.fmean(rewards[:3]) >= 0.2
    assert all(training.metrics[step]["training/rollout_probs_diff_max"] < 1e-5 for step in range(1, STEPS + 1))
