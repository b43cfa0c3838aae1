"""``grpo`` with ``backend: vllm`` and a real server: whole trainings of weights and of adapters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_plugins.demo.agent import CLIENT
from agentlightning_plugins.shared.training_records.query import read_ledger

TASKS = [f"{number} apples" for number in range(32)]


def call(llm: agl.LLM, text: str) -> str:
    client = CLIENT.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "none", max_retries=0)
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=llm.model, messages=messages)
    return answer.choices[0].message.content or ""


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def counting_agent(task: str, llm: agl.LLM) -> float:
    """Earns the share of digits in the answer."""
    return share_of_digits(call(llm, task))


def two_agents(task: str, writer: agl.LLM, reviewer: agl.LLM) -> float:
    """Calls two agents, each with its own policy."""
    return (share_of_digits(call(writer, task)) + share_of_digits(call(reviewer, task))) / 2


def train(agent: Any, server: Any, directory: Path, **settings: Any) -> list[dict[str, float]]:
    """Trains and returns the metrics of each step."""
    store = agl.create_store("memory://")
    algorithm = {
        "name": "grpo",
        "model": str(server.model),
        "backend": {"name": "vllm", "endpoint": server.endpoint},
        "tasks_per_step": 8,
        "rollouts_per_task": 8,
        "eval_every": 0,
        "rollout_timeout_s": 300.0,
        "sampling": {"temperature": 1.0, "max_tokens": 8},
        "train_threads": 1,
        **settings,
    }
    trainer = agl.Trainer(algorithm=algorithm, store=store, trackers=[], run_dir=directory, strategy="shm")
    assert trainer.fit(agent, TASKS).status == "succeeded"
    entries = asyncio.run(read_ledger(store))
    assert {entry.outcome for entry in entries} <= {"trained", "flat_group"}
    return [metrics.values for metrics in asyncio.run(store.query_metrics()).items if "reward" in metrics.values]


@pytest.mark.slow
def test_the_server_samples_with_the_newest_weights_in_each_step(server: Any, tmp_path: Path) -> None:
    steps = train(counting_agent, server, tmp_path, steps=4, update={"lr": 3e-3, "minibatches": 2})
    assert len(steps) == 4
    for step in steps:
        assert step["logprob_gap_max"] < 1e-3
        assert step["staleness"] == 0


@pytest.mark.soak
def test_the_policy_learns(server: Any, tmp_path: Path) -> None:
    steps = train(counting_agent, server, tmp_path, steps=12, update={"lr": 3e-3, "minibatches": 2})
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.3


@pytest.mark.slow
def test_two_policies_are_trained_as_adapters_of_one_server(server: Any, tmp_path: Path) -> None:
    steps = train(
        two_agents,
        server,
        tmp_path,
        steps=2,
        policies={"writer": None, "reviewer": None},
        lora={"rank": 4},
        update={"lr": 1e-2, "minibatches": 2},
    )
    assert len(steps) == 2
    for step in steps:
        gaps = {name: value for name, value in step.items() if name.endswith("logprob_gap_max")}
        assert len(gaps) >= 2
        assert max(gaps.values()) < 1e-3, gaps
