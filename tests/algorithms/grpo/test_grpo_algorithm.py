from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from openai import OpenAI

import agentlightning as agl
from agentlightning import semconv
from agentlightning.semconv import is_gateway_call
from agentlightning_algorithms.grpo.command import export, export_model
from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.demo.agent import CLIENT, calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.training_records.query import count_outcomes, read_ledger, read_rows
from tests.algorithms.glossary import find_unexplained
from tests.waiting import LIMIT_S

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
pytestmark = pytest.mark.usefixtures("server_thread")


hanging = threading.Event()


class HastyStore(agl.InMemoryLightningStore):
    """Gives little time to the tasks that hang, and to all others the time that a busy machine may need."""

    async def enqueue_many_rollouts(self, requests: Sequence[agl.EnqueueRolloutRequest]) -> Sequence[agl.Rollout]:
        changed = []
        for request in requests:
            assert request.config is not None
            assert request.config.timeout_seconds == LIMIT_S
            short = {"timeout_seconds": 0.3} if request.input["index"] % 4 == 1 else {}
            changed.append(request.model_copy(update={"config": request.config.model_copy(update=short)}))
        return await super().enqueue_many_rollouts(changed)


def unreliable_agent(task: dict[str, Any], llm: agl.LLM) -> Any:
    """Fails on three of every four tasks in different ways. With seed 5, each step has one task that succeeds."""
    calculator_agent(task, llm)
    if task["index"] % 4 == 0:
        raise LookupError("the tool is down")
    if task["index"] % 4 == 1:
        hanging.wait(LIMIT_S)
    if task["index"] % 4 == 2:
        return "nonsense"
    return calculator_agent(task, llm)


@pytest.mark.slow
def test_training_continues_when_rollouts_fail(tmp_path: Path) -> None:
    store = HastyStore()
    trainer = agl.Trainer(
        strategy="shm",
        algorithm={
            **SETTINGS,
            "rollout_timeout_s": LIMIT_S,
            "experience": {"failed_reward": -0.5},
            "target_reward": -0.1,
            "seed": 5,
        },
        store=store,
        trackers=["jsonl"],
        run_dir=tmp_path,
    )
    tasks = [{**problem, "index": index} for index, problem in enumerate(make_problems("train", N_TASKS))]
    hanging.clear()
    assert trainer.fit(unreliable_agent, tasks, [tasks[0]]).status == "succeeded"
    hanging.set()
    errors: dict[str, float] = {}
    metrics = asyncio.run(store.query_metrics()).items
    assert [step.step for step in metrics] == [0, 1, 2], "failures do not reach the target"
    assert find_unexplained(name for step in metrics for name in step.values) == set()
    evaluated = [step.values for step in metrics if "val_reward" in step.values]
    assert [(values["val_reward"], values["val_failure_rate"]) for values in evaluated] == [(-0.5, 1.0)] * 2
    for step in metrics:
        if "failure_rate" in step.values:
            assert step.values["reward"] <= 1.0 - 1.5 * step.values["failure_rate"]
        assert step.values.get("logprob_gap_max", 0.0) <= 1e-4
        for name, value in step.values.items():
            if name.startswith("errors/"):
                errors[name] = errors.get(name, 0) + value
    # A busy machine may lose the last span of an attempt that timed out.
    errors["errors/Timeout"] += errors.pop("errors/SpansDropped", 0.0)
    assert errors == {"errors/LookupError": 8.0, "errors/Timeout": 8.0, "errors/RolloutError": 8.0}
    failed = asyncio.run(store.query_rollouts(status_in=["failed"])).items
    assert {rollout.attempt.status for rollout in failed if isinstance(rollout, agl.AttemptedRollout)} == {
        "failed",
        "timeout",
    }


def test_without_rewards_the_run_ends_with_the_reason() -> None:
    trainer = agl.Trainer(algorithm=SETTINGS, store=agl.create_store("memory://"), trackers=[], strategy="shm")
    problems = make_problems("train", 2)
    with pytest.raises(agl.LightningError, match="none of the first 18 rollouts has a reward"):
        trainer.fit(unrewarded_agent, problems, problems)


def unrewarded_agent(task: dict[str, Any], llm: agl.LLM) -> None:
    """Returns no reward."""


def criticised_agent(task: dict[str, Any], llm: agl.LLM, request: agl.PromptTemplate) -> float:
    """The demo's agent and a critic of its work; both call the same model."""
    names: list[Any] = [{"agent.name": "solver"}, {"agent.name": "critic"}]
    with agl.operation(name="solver", **names[0]):
        reward = calculator_agent(task, llm)
    client = CLIENT.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
    with agl.operation(name="critic", **names[1]):
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": request.format(reward=reward)}], max_tokens=2
        )
    return reward


async def check_ledger(store: agl.LightningStore) -> None:
    """Checks that the ledger has each rollout of each step once and that the rows record what was trained on."""
    rollouts = [rollout for rollout in (await store.query_rollouts()).items if rollout.mode == "train"]
    for step in (1, 2):
        entries = await read_ledger(store, step)
        of_step = [rollout for rollout in rollouts if (rollout.metadata or {})["step"] == step]
        assert [entry.rollout_id for entry in entries] == [rollout.rollout_id for rollout in of_step]
        assert len(entries) == 16
        assert {entry.outcome for entry in entries} <= {"trained", "flat_group"}
        for entry in entries:
            rows = await read_rows(store, entry.rollout_id)
            trained = [call.response_id for row in rows for call in row.calls]
            assert sorted(trained) == sorted(call for call, outcome in entry.calls.items() if outcome == "trained")
            assert bool(rows) == (entry.outcome == "trained")
            for row in rows:
                assert (row.step, row.reward) == (step, entry.reward)
                assert {call.weight_version for call in row.calls} == {step - 1}
                assert any(row.advantages)
                calls = await store.query_spans(entry.rollout_id)
                sampled = {span.attributes.get("gen_ai.response.id"): span for span in calls if is_gateway_call(span)}
                for call in row.calls:
                    attributes = sampled[call.response_id].attributes
                    assert row.response_ids[call.start : call.end] == list(attributes[semconv.RESPONSE_TOKEN_IDS])
                assert row.trainer_logprobs == pytest.approx(row.logprobs, abs=1e-4)
                assert "".join(row.texts[token] for token in row.response_ids)
    counts = count_outcomes(await read_ledger(store))
    assert {step: counts[step].total() for step in counts} == {1: 16, 2: 16}


@pytest.mark.slow
def test_every_step_publishes_weights_and_trains_only_on_calls_of_the_matching_agent(tmp_path: Path) -> None:
    store = agl.create_store("memory://")
    gateway = agl.LLMProxy(model_list=[{"model": "other", "endpoint": "http://127.0.0.1:9/v1"}])
    trainer = agl.Trainer(
        algorithm=SETTINGS,
        adapter={"name": "triplet", "agent_match": "^solver$"},
        store=store,
        llm_proxy=gateway,
        initial_resources={"request": "How good is {reward}?"},
        trackers=[],
        run_dir=tmp_path,
    )
    trainer.fit(criticised_agent, make_problems("train", N_TASKS), make_problems("val", 4))
    assert gateway.models == ["policy", "policy-val", "other"]

    async def check() -> None:
        spans = (await store.query_spans(None)).items
        calls = [span for span in spans if agl.semconv.is_gateway_call(span)]
        versions = {}
        for rollout in (await store.query_rollouts()).items:
            step = (rollout.metadata or {})["step"]
            versions.setdefault((rollout.mode, step), set()).update(
                span.attributes[agl.semconv.WEIGHT_VERSION] for span in calls if span.rollout_id == rollout.rollout_id
            )
        assert versions == {("val", 0): {0}, ("train", 1): {0}, ("train", 2): {1}, ("val", 2): {2}}
        trained = [span for span in spans if span.name == "agentlightning.training"]
        rows = [step.values.get("rows", 0.0) for step in (await store.query_metrics()).items]
        assert len(trained) == sum(rows)
        answered = {span.attributes["gen_ai.response.id"] for span in calls}
        assert {span.attributes["gen_ai.response.id"] for span in trained} <= answered
        # The critic's calls, the last of each rollout, are recorded with tokens and not trained on.
        asked_last = {span.rollout_id: span for span in sorted(calls, key=lambda span: span.start_time or 0.0)}
        critics = {span.attributes["gen_ai.response.id"] for span in asked_last.values()}
        assert all(span.attributes[agl.semconv.RESPONSE_TOKEN_IDS] for span in asked_last.values())
        assert not critics & {span.attributes["gen_ai.response.id"] for span in trained}
        assert trained
        await check_ledger(store)
        latest = await store.get_latest_resources()
        assert latest is not None
        assert isinstance(latest.resources["llm"], agl.ProxyLLM)
        assert latest.resources["request"] == agl.PromptTemplate("How good is {reward}?", "f-string")

    asyncio.run(check())
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


@pytest.mark.slow
def test_lora_with_merged_rows_and_staleness_1_trains_and_exports(tmp_path: Path) -> None:
    """Together: LoRA, merged rows, sampling during training, bfloat16, KL in the reward, refilling."""
    store = agl.create_store("memory://")
    run = tmp_path / "run"
    settings = {
        **SETTINGS,
        "steps": 3,
        "experience": {"rows": "trajectories"},
        "lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]},
        "dtype": "bfloat16",
        "staleness": 1,
        "refill_rounds": 1,
        "update": {
            "lr": 1e-3,
            "old_logprobs": "trainer",
            "importance_weights": "token",
            "kl_coefficient": 0.01,
            "gradient_checkpointing": True,
        },
    }
    trainer = agl.Trainer(algorithm=settings, store=store, strategy="shm", trackers=[], run_dir=run)
    assert trainer.fit(calculator_agent, make_problems("train", N_TASKS), make_problems("val", 4)).status == "succeeded"

    async def check() -> None:
        steps = [item.values for item in (await store.query_metrics()).items]
        trained = [values for values in steps if "loss" in values]
        assert [values["staleness"] for values in trained] == [0.0, 1.0, 1.0]
        for values in trained:
            phases = [values[f"{name}_s"] for name in ("wait", "prepare", "train", "record", "publish")]
            assert min(phases) >= 0.0
            assert sum(phases) <= values["seconds"], "the phases do not overlap"
            assert 0 < values["importance_weight"] <= values["importance_weight_max"] <= 2.0
            # A turn that continues the previous turn is merged into its row.
            assert values["rows"] < values["calls"] or values["rows"] == 0
            assert {"reward", "success_rate", "reference_kl", "advantage_std", "entropy", "clip_fraction", "ratio",
                    "response_length", "calls_per_rollout", "queue_wait_s", "sample_s", "train_s", "publish_s",
                    "tokens_per_s", "train_tokens_per_s", "memory_gb", "drift/retokenisation", "refills",
                    "wait_s", "group_reward_std", "groups_without_spread", "warnings"} <= values.keys()  # fmt: skip

    asyncio.run(check())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32")
    command = CliRunner().invoke(export, [str(run), str(tmp_path / "additions"), "--checkpoint", "latest"])
    assert command.exit_code == 0, command.output
    assert (tmp_path / "additions" / "adapter_config.json").is_file()
    assert not (tmp_path / "additions" / "model.safetensors").exists()
    export_model(run, tmp_path / "merged", merge=True, checkpoint="latest")
    assert export_model(run, tmp_path / "best").name == "best"
    ids = torch.tensor([[1, 2, 3, 4]])
    with_additions = AutoModelForCausalLM.from_pretrained(tmp_path / "additions", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(merged(ids).logits, with_additions(ids).logits, atol=1e-4, rtol=1e-4)
    assert not torch.equal(merged(ids).logits, base(ids).logits)
    with (
        serve_model(str(run), "latest", dtype="float32") as served,
        OpenAI(base_url=served.endpoint, api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model="policy", prompt=[1, 2, 3, 4], max_tokens=8, temperature=0)
    expected = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, 4:]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
    with pytest.raises(agl.ConfigError, match="merged exists"):
        export_model(run, tmp_path / "merged")


def test_exporting_a_missing_model_names_the_models_that_exist(tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError, match="holds no trained model; it has: none"):
        export_model(tmp_path, tmp_path / "out")
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(agl.ConfigError, match="holds no best model; it has: latest"):
        export_model(tmp_path, tmp_path / "out", checkpoint="best")
