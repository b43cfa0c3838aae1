from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning_plugins.demo.agent import calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT

SETTINGS = {
    "name": "grpo",
    "model": str(CHECKPOINT),
    "steps": 2,
    "tasks_per_step": 4,
    "rollouts_per_task": 4,
    "eval_every": 0,
    "sampling": {"temperature": 1.0, "max_tokens": 32},
    "update": {"lr": 1e-3, "minibatches": 2, "old_logprobs": "trainer"},
    "train_threads": 1,
}
N_TASKS = 8


def unreliable_agent(task: dict[str, Any], llm: agl.LLM) -> Any:
    """The demo's agent, except that every other task goes wrong in a way of its own."""
    calculator_agent(task, llm)
    if task["index"] % 4 == 0:
        raise LookupError("the tool is down")
    if task["index"] % 4 == 1:
        time.sleep(60)
    if task["index"] % 4 == 2:
        return "nonsense"
    return calculator_agent(task, llm)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_training_goes_on_whatever_agents_do(tmp_path: Path) -> None:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(
        algorithm={**SETTINGS, "rollout_timeout_s": 2.0}, store=store, trackers=["jsonl"], run_dir=tmp_path
    )
    tasks = [{**problem, "index": index} for index, problem in enumerate(make_problems("train", N_TASKS))]
    assert trainer.fit(unreliable_agent, tasks).status == "succeeded"
    errors: dict[str, float] = {}
    for step in asyncio.run(store.query_metrics()).items:
        assert step.values.get("logprob_gap_max", 0.0) <= 1e-4
        for name, value in step.values.items():
            if name.startswith("errors/"):
                errors[name] = errors.get(name, 0) + value
    assert errors == {"errors/LookupError": 8.0, "errors/Timeout": 8.0, "errors/RolloutError": 8.0}
    failed = asyncio.run(store.query_rollouts(status_in=["failed"])).items
    assert {rollout.attempt.status for rollout in failed if isinstance(rollout, agl.AttemptedRollout)} == {
        "failed",
        "timeout",
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_step_publishes_weights_and_explains_its_rows(tmp_path: Path) -> None:
    store = agl.create_store("memory://")
    trainer = agl.Trainer(algorithm=SETTINGS, store=store, trackers=[], run_dir=tmp_path)
    trainer.fit(calculator_agent, make_problems("train", N_TASKS), make_problems("val", 4))

    async def check() -> None:
        spans = (await store.query_spans(None)).items
        calls = [span for span in spans if agl.semconv.is_gateway_call(span)]
        versions = {}
        for rollout in (await store.query_rollouts()).items:
            step = (rollout.metadata or {})["step"]
            versions.setdefault((rollout.mode, step), set()).update(
                span.attributes[agl.semconv.WEIGHT_VERSION] for span in calls if span.rollout_id == rollout.rollout_id
            )
        assert versions == {("val", 0): {0}, ("train", 0): {0}, ("train", 1): {1}, ("val", 2): {2}}
        trained = [span for span in spans if span.name == "agentlightning.training"]
        rows = [step.values.get("rows", 0.0) for step in (await store.query_metrics()).items]
        assert len(trained) == sum(rows)
        answered = {span.attributes["gen_ai.response.id"] for span in calls}
        assert {span.attributes["gen_ai.response.id"] for span in trained} <= answered
        latest = await store.get_latest_resources()
        assert latest is not None
        assert isinstance(latest.resources["llm"], agl.ProxyLLM)

    asyncio.run(check())
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
