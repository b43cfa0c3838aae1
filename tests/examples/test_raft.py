"""``examples/raft``: an algorithm written with ``TrainingSession``."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.raft import raft as example
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.grpo.training_session import Sample, TrainingSession
from agentlightning_algorithms.shared.policy.loss import Surrogate
from agentlightning_algorithms.shared.policy.training_row import Distribution
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from tests.algorithms.server_thread import threads_for_servers

PROBLEMS = make_problems("train", 8)


def train(directory: Path, algorithm: Any, steps: int, *, resume: bool = False, **more: Any) -> list[dict[str, float]]:
    """Trains on eight problems and returns the metrics of each step, including the evaluation before the first."""
    store = agl.create_store(f"sqlite:///{directory.parent}/{directory.name}.db")
    example.settings = dataclasses.replace(example.settings, steps=steps, **more)
    trainer = agl.Trainer(
        algorithm=algorithm, store=store, strategy="shm", trackers=[], run_dir=directory, resume=resume, seed=0
    )
    with threads_for_servers():
        assert trainer.fit(calculator_agent, PROBLEMS, PROBLEMS).status == "succeeded"

    async def read() -> list[dict[str, float]]:
        try:
            return [dict(step.values) for step in (await store.query_metrics()).items]
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.fixture(autouse=True)
def restored_settings() -> Any:
    before = example.settings
    yield
    example.settings = before


@pytest.mark.soak
def test_raft_has_at_most_40_lines_and_learns(tmp_path: Path) -> None:
    assert len(inspect.getsource(example).splitlines()) <= 40
    metrics = train(tmp_path / "run", example.raft, 6, tasks_per_step=8, rollouts_per_task=8)
    before, _, after = (step["val_reward"] for step in metrics if "val_reward" in step)
    assert after >= before + 0.25, "seeds gain from 0.5 to 0.9"
    assert all(step["chosen"] > 0 for step in metrics[1:])
    assert (tmp_path / "run" / "best" / "model.safetensors").is_file()


def test_a_resumed_training_equals_one_that_was_not_stopped(tmp_path: Path) -> None:
    small = {"tasks_per_step": 4, "eval_every": 0}
    whole = train(tmp_path / "whole", example.raft, 2, **small)
    train(tmp_path / "parts", example.raft, 1, **small)
    parts = train(tmp_path / "parts", example.raft, 2, resume=True, **small)
    rewards = [[step["reward"] for step in steps if "reward" in step] for steps in (whole, parts)]
    assert len(rewards[0]) == 2
    assert rewards[0] == rewards[1]
    ends = [load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_an_algorithm_can_train_on_samples_with_its_own_loss_function(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    samples: list[Sample] = []
    likelihoods: list[float] = []

    def loss(logprob_BT: Any, old_BT: Any, advantage_BT: Any, mask_BT: Any, settings: Any) -> Surrogate:
        likelihoods.append(float((logprob_BT.detach() * mask_BT).sum()))
        return Surrogate(-logprob_BT * advantage_BT, logprob_BT.detach() - old_BT, *[torch.zeros_like(mask_BT)] * 2)

    @agl.algo
    async def imitate(context: Any, train_dataset: Any, val_dataset: Any) -> None:
        async with TrainingSession.open(context, example.settings, train_dataset, val_dataset) as session:
            async for _ in session.steps():
                if not samples:
                    samples.extend(await session.sample(messages, n=4, max_tokens=8))
                    (cold,) = await session.sample(messages, max_tokens=8, temperature=0.5)
                    assert cold.row(1.0).distribution == Distribution(0.5)
                for half in (samples[:2], samples[2:]):  # gradients accumulate until the optimizer step
                    await session.forward_backward([sample.row(1.0) for sample in half], loss)
                await session.optim_step()
            assert {sample.weight_version for sample in samples} == {0}
            assert (await session.sample(messages))[0].weight_version == 3

    train(tmp_path / "run", imitate, 3, eval_every=0)
    assert len(samples) == 4
    assert {sample.row(1.0).distribution for sample in samples} == {None}
    assert all(len(sample.token_ids) == len(sample.logprobs) for sample in samples)
    assert sum(likelihoods[4:]) > sum(likelihoods[:2])
    assert sum(likelihoods[:2]) == pytest.approx(sum(sum(s.logprobs) for s in samples), abs=1e-3)


def test_an_unknown_loss_is_refused_with_a_suggestion() -> None:
    with pytest.raises(agl.PluginError, match="cross_entropy"):
        get_manager().get("policy_loss", "crossentropy")
