"""Several policies in one run: LoRA adapters over one model, each sampled, trained and saved separately."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from openai import AsyncOpenAI, OpenAI

import agentlightning as agl
from agentlightning import semconv
from agentlightning.types import Metrics, Rollout, Triplet
from agentlightning_algorithms.grpo.collector import model_entries
from agentlightning_algorithms.grpo.command import export, export_model, serve
from agentlightning_algorithms.grpo.episode import Episode
from agentlightning_algorithms.grpo.settings import GRPOSettings, PolicySettings
from agentlightning_algorithms.grpo.trained_policy import PolicySet, join_metrics
from agentlightning_algorithms.grpo.transformers_backend import TransformersBackend
from agentlightning_algorithms.grpo.vllm_backend import VLLMBackend
from agentlightning_algorithms.shared.policy.model import Policy
from agentlightning_algorithms.shared.policy.settings import LoraSettings, UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow
from agentlightning_algorithms.shared.policy_backend import PolicySetup, publish_weights
from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.demo.agent import CLIENT, calculator_agent
from agentlightning_plugins.demo.task import make_problems
from agentlightning_plugins.demo.training import CHECKPOINT
from agentlightning_plugins.shared.monitoring.metrics import judge
from agentlightning_plugins.shared.training_records.query import read_ledger, read_rows
from tests.algorithms.vllm_server import WIRE, FakeVLLM

pytestmark = pytest.mark.usefixtures("server_thread")
PROMPTS = [[5, 6, 7], [80, 81, 82, 83], list(range(20, 60))]


def load_policies(model: Path, **more: Any) -> PolicySet:
    policies = {"writer": None, "reviewer": PolicySettings(lora=LoraSettings(rank=2))}
    options: dict[str, Any] = {"lora": LoraSettings(rank=4), "update": UpdateSettings(lr=0.02), **more}
    settings = GRPOSettings(model=str(model), policies=policies, **options)
    assert settings.update is not None
    return PolicySet.load(settings, settings.update)


def rows_of(policy: Policy, advantage: float = 1.0) -> list[TrainingRow]:
    rows = [TrainingRow(prompt, [9, 8, 7, 6], [0.0] * 4, advantage) for prompt in PROMPTS]
    return [
        TrainingRow(row.prompt_ids, row.response_ids, own, advantage)
        for row, own in zip(rows, policy.score(rows), strict=True)
    ]


def weights_of(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.model.parameters() if p.requires_grad]


async def sample(client: AsyncOpenAI, model: str) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and log-probabilities of one prompt after the other: another batch may round differently."""
    found = []
    for prompt in PROMPTS:
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=12, seed=3, logprobs=1, extra_body={"return_token_ids": True}
        )
        assert answer.model == model
        choice: Any = answer.choices[0]
        found.append((choice.token_ids, choice.logprobs.token_logprobs))
    return found


async def test_a_step_on_one_policy_leaves_the_tokens_of_other_policies_bit_identical(
    tiny_model: Path, tmp_path: Path
) -> None:
    policies = load_policies(tiny_model)
    writer, reviewer = policies
    for policy in (writer, reviewer):  # so that both differ from the base, and from each other
        policy.updater.update(rows_of(policy.updater.policy, 1.0 if policy is writer else -1.0))
    backend, gateway = (
        TransformersBackend(prefix_cache_mb=0),
        agl.LLMProxy(model_list=[], store=agl.InMemoryLightningStore()),
    )
    await backend.start(PolicySetup(model=str(tiny_model), model_name="policy", directory=tmp_path, threads=1))
    try:
        async with AsyncOpenAI(base_url=backend.endpoint, api_key="none", max_retries=0) as client:

            async def sample_all() -> dict[str, list[tuple[list[int], list[float]]]]:
                names = [model.id for model in (await client.models.list()).data]
                assert names == ["policy", "writer", "reviewer"]
                found = await asyncio.gather(*(sample(client, name) for name in names))
                return dict(zip(names, found, strict=True))

            await publish_weights(backend, gateway, policies.publish(tmp_path / "0"), 1)
            before = await sample_all()
            assert len({str(found) for found in before.values()}) == 3
            for policy in policies:  # each answers with its own adapter
                rows = [TrainingRow(p, *drawn, 0.0) for p, drawn in zip(PROMPTS, before[policy.name], strict=True)]
                for row, own in zip(rows, policy.updater.policy.score(rows), strict=True):
                    assert row.logprobs == pytest.approx(own, abs=1e-4)
            kept = weights_of(reviewer.updater.policy)
            writer.updater.update(rows_of(writer.updater.policy))
            assert all(map(torch.equal, kept, weights_of(reviewer.updater.policy)))
            await publish_weights(backend, gateway, policies.publish(tmp_path / "1"), 2)
            after = await sample_all()
            assert after["reviewer"] == before["reviewer"]
            assert after["policy"] == before["policy"]
            assert after["writer"] != before["writer"]
            assert (await backend.statistics())["requests"] == 2 * 3 * len(PROMPTS)
            with pytest.raises(agl.ConfigError, match="of another shape .* resume with the same lora settings"):
                await backend.load_adapter("reviewer", tmp_path / "1" / "writer", 3)
            with pytest.raises(agl.ConfigError, match="are shared with its adapters"):
                await backend.load_weights(tiny_model, 3)
            with pytest.raises(agl.ConfigError, match="has no LoRA adapters for this model"):
                await backend.load_adapter("third", tiny_model, 3)
            assert await sample_all() == after
    finally:
        await backend.stop()


@pytest.mark.slow
async def test_adapters_that_sample_concurrently_give_the_same_tokens_as_on_their_own(
    tiny_model: Path, tmp_path: Path
) -> None:
    names = [f"policy_{number}" for number in range(8)]
    settings = GRPOSettings(model=str(tiny_model), policies=dict.fromkeys(names), lora=LoraSettings(rank=2))
    assert settings.update is not None
    policies = PolicySet.load(settings, settings.update)
    with torch.no_grad():
        for policy in policies:
            for parameter in policy.updater.policy.model.parameters():
                if parameter.requires_grad:
                    parameter += 0.3 * torch.randn_like(parameter)
    backend, gateway = (
        TransformersBackend(prefix_cache_mb=0),
        agl.LLMProxy(model_list=[], store=agl.InMemoryLightningStore()),
    )
    await backend.start(PolicySetup(model=str(tiny_model), model_name="policy", directory=tmp_path, threads=1))
    try:
        await publish_weights(backend, gateway, policies.publish(tmp_path / "0"), 1)
        async with AsyncOpenAI(base_url=backend.endpoint, api_key="none", max_retries=0) as client:
            alone = [await sample(client, name) for name in names]
            assert len({str(found) for found in alone}) == len(names)
            assert await asyncio.gather(*(sample(client, name) for name in names)) == alone
        assert (await backend.statistics())["requests"] == 2 * len(names) * len(PROMPTS)
    finally:
        await backend.stop()


def test_a_checkpoint_restores_every_policy_and_its_optimizer(tiny_model: Path, tmp_path: Path) -> None:
    policies = load_policies(tiny_model, update=UpdateSettings(lr=0.02, minibatches=2, kl_coefficient=0.1))
    for sign, policy in zip((1.0, -1.0), policies, strict=True):
        policy.updater.update(rows_of(policy.updater.policy, sign))
    states = {p.name: p.updater.state({"watch": p.monitor.state(), "step": 1}) for p in policies}
    policies.write(tmp_path / "checkpoint", states)
    restored = load_policies(tiny_model, update=UpdateSettings(lr=0.02, minibatches=2, kl_coefficient=0.1))
    assert restored.read(tmp_path / "checkpoint")["step"] == 1
    for one, other in zip(policies, restored, strict=True):
        rows = rows_of(one.updater.policy)
        for policy in (one, other):  # the second update depends on Adam's moments, the reference and the order of rows
            policy.updater.update(rows)
        assert all(map(torch.equal, weights_of(one.updater.policy), weights_of(other.updater.policy)))
    third = GRPOSettings(model=str(tiny_model), policies={"other": None}, lora=LoraSettings(rank=4))
    assert third.update is not None
    with pytest.raises(agl.ConfigError, match="no checkpoint in .*other"):
        PolicySet.load(third, third.update).read(tmp_path / "checkpoint")


def reviewed_agent(task: dict[str, Any], solver: agl.LLM, critic: agl.LLM) -> float:
    """Runs the demo's agent and a critic of its work, each with its own policy."""
    reward = calculator_agent(task, solver)
    client = CLIENT.with_options(base_url=critic.get_base_url(), api_key=critic.api_key or "unused")
    said = client.chat.completions.create(
        model=critic.model, messages=[{"role": "user", "content": f"How good is {reward}?"}], max_tokens=2
    )
    return reward + 0.1 * (len(said.choices[0].message.content or "") % 3)


SETTINGS: Mapping[str, Any] = {
    "name": "grpo",
    "model": str(CHECKPOINT),
    "policies": {"solver": {}, "critic": {"update": {"lr": 2e-2, "old_logprobs": "trainer"}}},
    "lora": {"rank": 4},
    "tasks_per_step": 2,
    "rollouts_per_task": 4,
    "eval_every": 0,
    "sampling": {"temperature": 1.0, "max_tokens": 32},
    "update": {"lr": 1e-2, "minibatches": 2, "old_logprobs": "trainer"},
    "train_threads": 1,
}


def train(store: agl.LightningStore, directory: Path, steps: int, *, resume: bool = False) -> None:
    trainer = agl.Trainer(
        algorithm={**SETTINGS, "steps": steps}, store=store, strategy="shm", trackers=["jsonl"], run_dir=directory,
        resume=resume,
    )  # fmt: skip
    assert trainer.fit(reviewed_agent, make_problems("train", 4), make_problems("val", 2)).status == "succeeded"


async def check_records(store: agl.LightningStore) -> None:
    """Checks that each rollout has one ledger entry and that each row has the calls of only one policy."""
    entries = await read_ledger(store)
    assert len({entry.rollout_id for entry in entries}) == len(entries) == 3 * 8
    trained: dict[str, int] = {}
    for entry in entries:
        spans = (await store.query_spans(entry.rollout_id)).items
        calls = [span for span in spans if semconv.is_gateway_call(span)]
        models = {span.attributes["gen_ai.response.id"]: semconv.read_model(span) for span in calls}
        assert entry.calls.keys() == models.keys()
        for row in await read_rows(store, entry.rollout_id):
            (model,) = {models[call.response_id] for call in row.calls}
            trained[str(model)] = trained.get(str(model), 0) + 1
            assert row.trainer_logprobs == pytest.approx(row.logprobs, abs=2e-3)
    assert set(trained) == {"solver", "critic"}


def own_metrics(step: Mapping[str, float], name: str) -> dict[str, float]:
    return {key.removeprefix(f"{name}/"): value for key, value in step.items() if key.startswith(f"{name}/")}


def check_joined(parts: Mapping[str, Mapping[str, float]], step: Mapping[str, float]) -> None:
    """Checks that the step joins the metrics of its policies to metrics of the run, for charts and health states."""
    tokens = {name: part["response_tokens"] for name, part in parts.items() if "loss" in part}
    assert tokens
    for metric in ("loss", "entropy", "grad_norm", "approx_kl", "clip_fraction"):
        mean = sum(parts[name][metric] * tokens[name] for name in tokens) / sum(tokens.values())
        assert step[metric] == pytest.approx(mean, rel=1e-9, abs=1e-12)
    for metric in ("rows", "response_tokens", "optimizer_steps", "calls"):
        assert step[metric] == sum(part[metric] for part in parts.values())
    assert step["logprob_gap_max"] == max(part.get("logprob_gap_max", 0.0) for part in parts.values())
    health = {health.name for health in judge([Metrics(step=1, time=0.0, values=dict(step))])}
    assert health >= {"Entropy", "Update size", "Sampler gap", "Gradient norm", "Flat groups"}


@pytest.mark.slow
def test_a_run_trains_two_agents_and_resumes_serves_and_exports_both(tmp_path: Path) -> None:
    store, run = agl.create_store("memory://"), tmp_path / "run"
    train(store, run, 2)
    train(store, run, 3, resume=True)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [step for step in steps if "solver/loss" in step or "critic/loss" in step]
    assert [step["step"] for step in learned] == [1, 2, 3]
    for step in learned:
        check_joined({name: own_metrics(step, name) for name in ("solver", "critic")}, step)
        assert step["calls_per_rollout"] == step["solver/calls_per_rollout"] + step["critic/calls_per_rollout"]
        assert step["critic/calls_per_rollout"] == 1.0
        # From the second step on, a call trained with the other adapter would differ by far more.
        for name in ("solver", "critic"):
            assert step.get(f"{name}/logprob_gap_max", 0.0) < 1e-3
    assert {step["critic/lr"] for step in learned} == {2e-2}
    assert {step["solver/lr"] for step in learned} == {1e-2}
    asyncio.run(check_records(store))
    for name in ("solver", "critic"):
        state = torch.load(run / "checkpoint" / name / "updater.pt", weights_only=True)
        assert state["updates"] == state["caller"]["step"] == 3

    done = CliRunner().invoke(export, [str(run), str(tmp_path / "out"), "--checkpoint", "latest"])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["critic", "solver"]
    assert (tmp_path / "out" / "critic" / "adapter_config.json").is_file()
    assert "solver" in (tmp_path / "out" / "solver" / "README.md").read_text()
    export_model(run, tmp_path / "whole", merge=True, checkpoint="latest")
    assert (tmp_path / "whole" / "critic" / "model.safetensors").is_file()
    with (
        serve_model(str(run), "latest") as served,
        OpenAI(base_url=served.endpoint, api_key="none", max_retries=0) as client,
    ):
        resources: Any = served.resources()
        assert {name: llm.model for name, llm in resources.items()} == {"solver": "solver", "critic": "critic"}
        texts = [
            client.completions.create(model=name, prompt=[1, 2, 3, 4], max_tokens=8, temperature=0).choices[0].text
            for name in ("solver", "critic")
        ]
        assert all(isinstance(text, str) for text in texts)
    with pytest.raises(agl.ConfigError, match=r"saved LoRA adapters or shards; .* the folder of one"):
        agl.GRPO(model=str(run))
    refused = CliRunner().invoke(serve, [str(run), "--command", "true {model}"])
    assert "has several policies (critic, solver)" in str(refused.exception)


def test_a_policy_without_calls_takes_no_optimizer_step_and_is_reported(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = GRPOSettings(model=str(tiny_model), policies={"writer": None, "reviewer": None}, lora=LoraSettings())
    assert settings.update is not None
    policies = PolicySet.load(settings, settings.update)
    response = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0]}
    asked = {"requested_model": "writer", "response_id": "1"}
    call = Triplet(prompt={"token_ids": [3, 4]}, response=response, metadata=asked)
    other = call.model_copy(update={"metadata": {"requested_model": "judge", "response_id": "2"}})
    unasked = call.model_copy(
        update={"metadata": {"model": "writer"}}
    )  # from an adapter that does not record requested_model
    one = Episode(Rollout(rollout_id="ro-1", input=0, start_time=0.0), 1.0, [unasked, other])
    assert [list(policy.select([one])[0].triplets) for policy in policies] == [[unasked], []]
    episodes = [
        Episode(Rollout(rollout_id=f"ro-{i}", input=0, start_time=0.0, metadata={"group": "0"}), i, [call, other])
        for i in range(2)
    ]
    assert [len(episode.triplets) for episode in policies.select(episodes)] == [1, 1]
    found = {policy.name: policy.learn(episodes, settings, None, 0)[1] for policy in policies}
    assert found["writer"]["rows"] == 2
    assert found["writer"]["optimizer_steps"] == 1
    assert found["reviewer"]["rows"] == found["reviewer"]["optimizer_steps"] == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if "none of 2 rollouts called the policy reviewer" in text]
    assert not [text for text in warnings if "called the policy writer" in text]


def test_the_only_policy_of_a_run_is_not_trained_on_the_calls_of_another_model(tiny_model: Path) -> None:
    settings = GRPOSettings(model=str(tiny_model))
    assert settings.update is not None
    policies = PolicySet.load(settings, settings.update)
    response = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0]}
    calls = [
        Triplet(prompt={"token_ids": [3, 4]}, response=response, metadata={**asked, "response_id": f"r{number}"})
        for number, asked in enumerate(
            [
                {"requested_model": "policy", "model": "a name of the server for it"},
                {"requested_model": "clerk", "model": "clerk"},
                {},
            ]
        )
    ]
    drawn = {"r0": Distribution(1.0), "r1": Distribution(0.2), "r9": Distribution(0.2), "None": Distribution(0.2)}
    episodes = [
        Episode(Rollout(rollout_id=f"ro-{i}", input=0, start_time=0.0, metadata={"group": "0"}), i, calls, "", drawn)
        for i in range(2)
    ]
    for selected in (policies.select(episodes), policies.first.select(episodes)):
        assert [call.metadata["response_id"] for call in selected[0].triplets] == ["r0", "r2"]
    experience, metrics = policies.first.learn(episodes, settings, None, 0)
    assert metrics["rows"] == 4
    assert metrics["calls_of_other_sampling"] == 0
    assert all("clerk" not in str(turn.triplet.metadata) for _, turns in experience.sources for turn, _ in turns)


def test_metrics_of_several_policies_are_joined_to_metrics_of_the_run() -> None:
    writer = {
        "calls": 8.0, "groups": 2.0, "rows": 8.0, "response_tokens": 30.0, "loss": 1.0, "entropy": 0.5,
        "logprob_gap_max": 1e-5, "advantage_min": -1.0, "train_tokens_per_s": 100.0, "seconds": 1.0,
    }  # fmt: skip
    reviewer = {
        "calls": 4.0, "groups": 2.0, "rows": 4.0, "response_tokens": 10.0, "loss": 3.0, "entropy": 1.5,
        "logprob_gap_max": 1e-4, "advantage_min": -2.0, "train_tokens_per_s": 200.0, "seconds": 3.0,
    }  # fmt: skip
    idle = {"calls": 0.0, "groups": 2.0, "rows": 0.0, "response_tokens": 0.0, "seconds": 0.0}
    assert join_metrics([writer, reviewer, idle]) == {
        "calls": 12.0, "groups": 2.0, "rows": 12.0, "response_tokens": 40.0, "loss": 1.5, "entropy": 0.75,
        "logprob_gap_max": 1e-4, "advantage_min": -2.0, "train_tokens_per_s": 175.0, "seconds": 4.0,
    }  # fmt: skip
    flat = {"groups_without_spread": 1.0, "response_tokens": 0.0}
    assert join_metrics([flat, flat])["groups_without_spread"] == 1.0


def test_a_warning_about_a_policy_uses_only_the_metrics_of_that_policy(tiny_model: Path) -> None:
    policies = load_policies(tiny_model)
    usual = {"reward": 0.5, "entropy": 1.0, "writer/entropy": 1.0, "writer/optimizer_steps": 1.0}
    assert [policies.observe(usual) for _ in range(4)] == [[]] * 4
    (warning,) = policies.observe({**usual, "entropy": 0.01, "writer/entropy": 0.01})
    assert warning.startswith("writer: entropy collapsed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policies": {"writer": {}, "reviewer": {}}}, "writer has no lora; several policies must be LoRA adapters"),
        ({"policies": {}, "lora": {}}, "policies is empty; name at least one"),
        ({"policies": {"policy": {}}, "lora": {}}, "'policy' cannot be the name of a policy"),
        ({"policies": {"two words": {}}, "lora": {}}, "'two words' cannot be the name of a policy"),
        ({"policies": {"writer": {"lr": 1}}, "lora": {}}, "policies has no key 'writer.lr'"),
    ],
)
def test_wrong_policies_are_refused_before_the_run(tiny_model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(agl.ConfigError, match=message):
        agl.Trainer(algorithm={"name": "grpo", "model": str(tiny_model), **settings})


async def test_vllm_serves_policies_as_lora_adapters(tiny_model: Path, tmp_path: Path) -> None:
    settings = GRPOSettings(model=str(tiny_model), policies={"writer": None, "reviewer": None}, lora=LoraSettings())
    assert settings.update is not None
    policies = PolicySet.load(settings, settings.update)

    async def publish(backend: VLLMBackend, step: int) -> None:
        weights = policies.publish(tmp_path / str(step))
        assert isinstance(weights, dict)
        for name, path in weights.items():
            await backend.load_adapter(name, path, step)

    async with FakeVLLM() as server:
        backend = VLLMBackend(endpoint=server.endpoint)
        await backend.start(PolicySetup(model="unused", model_name="policy", directory=tmp_path))
        entries = model_entries(backend.model_entry, settings, policies)
        assert [(entry["model_name"], entry["model"]) for entry in entries] == [
            ("writer", "writer"), ("writer-val", "writer"), ("reviewer", "reviewer"), ("reviewer-val", "reviewer"),
        ]  # fmt: skip
        await publish(backend, 0)
        reloads = [body["kwargs"]["weights_path"] for path, body in server.asked if path == "/collective_rpc"]
        assert reloads == [WIRE["models"]["data"][0]["root"]], "an earlier training may have left other weights"
        assert server.adapters == {name: str(tmp_path / "0" / name) for name in ("writer", "reviewer")}
        server.asked.clear()
        await publish(backend, 1)
        assert server.adapters == {name: str(tmp_path / "1" / name) for name in ("writer", "reviewer")}
        paths = [path for path, _ in server.asked]
        assert paths == ["/pause?mode=wait", "/v1/unload_lora_adapter", "/v1/load_lora_adapter", "/resume"] * 2
    async with FakeVLLM(lora=False) as server:
        backend = VLLMBackend(endpoint=server.endpoint)
        await backend.start(PolicySetup(model="unused", model_name="policy", directory=tmp_path))
        with pytest.raises(agl.ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
            await publish(backend, 0)
        assert not server.paused
