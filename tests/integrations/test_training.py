"""One step of GRPO for the agent of each framework, in one run with one model server; each step trains one agent."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.run.thread import run_in_thread
from agentlightning.testing.agent import ask
from tests.algorithms.tiny_model import save_tiny_model
from tests.integrations.framework_agent import AGENTS
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.environment("main")  # needs all frameworks

GROUP = 4


class AgentOfTask(agl.LitAgent[Any]):
    """Runs the agent that the task names."""

    def __init__(self, agents: dict[str, Any]) -> None:
        self._agents = {name: agl.wrap(agent, reward=grade) for name, agent in agents.items()}

    async def rollout_async(self, task: Any, resources: agl.NamedResources, rollout: agl.Rollout) -> Any:
        agent = self._agents[task["framework"]]
        if agent.is_async():
            return await agent.training_rollout_async(task["question"], resources, rollout)
        return await run_in_thread(lambda: agent.training_rollout(task["question"], resources, rollout), name="agent")


def grade(task: str, output: Any, rollout: agl.Rollout) -> float:
    """Returns a reward that differs for different words, so that every group of an untrained model has spread."""
    return zlib.crc32(str(output).encode()) % 1009 / 1008


@dataclass
class Training:
    """The results of the run."""

    rollouts: dict[str, list[agl.Rollout]] = field(default_factory=dict)
    spans: dict[str, list[agl.Span]] = field(default_factory=dict)
    """Spans by framework, like ``rollouts``."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by step."""


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    model = tmp_path_factory.mktemp("model")
    save_tiny_model(model, max_length=16384)
    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm={
            "name": "grpo",
            "model": str(model),
            "steps": len(AGENTS),
            "tasks_per_step": 1,
            "rollouts_per_task": GROUP,
            "eval_every": 0,
            "keep_steps": 0,
            "sampling": {"temperature": 1.0, "max_tokens": 8},
            "update": {"lr": 1e-3, "minibatches": 1},
            "rollout_timeout_s": LIMIT_S,
            "train_threads": 1,
        },
        store=store,
        strategy="shm",
        trackers=[],
        max_concurrency=GROUP,
    )
    tasks = [{"framework": name, "question": ask(2, 3)} for name in AGENTS]
    run = trainer.fit(AgentOfTask({name: make() for name, make in AGENTS.items()}), tasks)
    assert run.status == "succeeded"
    return asyncio.run(_read(store))


async def _read(store: agl.LightningStore) -> Training:
    training = Training()
    for rollout in (await store.query_rollouts()).items:
        framework = rollout.input["framework"]
        training.rollouts.setdefault(framework, []).append(rollout)
        training.spans.setdefault(framework, []).extend((await store.query_spans(rollout.rollout_id)).items)
    for point in (await store.query_metrics()).items:
        training.metrics.setdefault(point.step, {}).update(point.values)
    await store.close()
    return training


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # crewai reads its own deprecated fields
@pytest.mark.parametrize("framework", AGENTS)
def test_one_step_of_grpo_trains_the_agent(framework: str, training: Training) -> None:
    rollouts = training.rollouts[framework]
    assert _errors(rollouts) == []
    assert len(rollouts) == GROUP
    spans = training.spans[framework]
    answered = {span.attributes["gen_ai.response.id"] for span in spans if agl.semconv.is_gateway_call(span)}
    rows = [span for span in spans if span.name == "agentlightning.training"]
    assert {row.attributes["gen_ai.response.id"] for row in rows} == answered
    assert len(rows) >= GROUP
    (step,) = {(rollout.metadata or {})["step"] for rollout in rollouts}
    metrics = training.metrics[step]
    assert metrics["rows"] == len(rows)
    assert metrics["logprob_gap_max"] <= 1e-4
    assert math.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
    versions = {span.attributes[agl.semconv.WEIGHT_VERSION] for span in spans if agl.semconv.is_gateway_call(span)}
    assert versions == {step - 1}, "each step samples with the weights of the previous step"


def _errors(rollouts: Sequence[agl.Rollout]) -> list[Any]:
    attempts = [rollout.attempt for rollout in rollouts if isinstance(rollout, agl.AttemptedRollout)]
    return [attempt.error for attempt in attempts if attempt.status != "succeeded"]
