"""Longer trainings: the reward rises, and two ranks compute what one computes."""

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


def test_two_ranks_on_one_node_or_two_train_like_one_rank(tmp_path: Path, model: Path) -> None:
    """Each batch has two optimizer steps, whose rows verl would choose by the number of ranks.

    The nodes are those of Ray, on one machine. Each has one GPU for Ray, so that each gets one rank.
    """
    tasks = [task("seeded", f"say {letter}", 2) for letter in "abcdefgh"]  # a step has all rows of two tasks
    trainings = []
    for ranks, nodes in ((1, 1), (2, 1), (1, 2)):
        directory = tmp_path / f"{ranks}-ranks-on-{nodes}"
        config = {
            "trainer": {"n_gpus_per_node": ranks, "nnodes": nodes, "total_training_steps": 2},
            "data.train_batch_size": 4,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.fsdp_config": {"param_offload": True, "optimizer_offload": True},
        }
        log = directory.with_suffix(".log")
        more = {"nodes": nodes} if nodes > 1 else {}
        run([job(directory, model, tasks, config, **more)], log, timeout_s=3000.0)
        trainings.append(read(directory, log))
    one, *others = trainings
    for other in others:
        for step in (1, 2):
            assert one.metrics[step]["optimizer_steps"] == other.metrics[step]["optimizer_steps"] == 2
            for name in ("reward", "reward_std", "actor/grad_norm", "actor/pg_loss"):
                assert other.metrics[step][name] == pytest.approx(one.metrics[step][name], rel=1e-5, abs=1e-6)
