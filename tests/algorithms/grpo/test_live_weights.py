"""Live learning of weights: adapters in a folder, their training on served rollouts, and the whole loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from examples.live_weights.live_weights import SFT_SETTINGS, serve, traffic
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning_algorithms.offline.dpo import DPO
from agentlightning_algorithms.offline.training import SFT
from agentlightning_algorithms.shared.live_resources import LiveExperience, Result, read_live_history
from agentlightning_algorithms.shared.policy.lora import add_lora
from agentlightning_algorithms.shared.policy.model import load_policy
from agentlightning_algorithms.shared.policy.settings import LoraSettings
from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.demo.training import CHECKPOINT
from tests.algorithms.grpo.test_grpo_serving import generate
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("server_thread")
CHAT = {"messages": [{"role": "user", "content": "say something"}], "temperature": 0, "max_tokens": 12}


def write_adapter(model: Path, folder: Path, name: str, seed: int) -> None:
    """Writes a random adapter to ``folder/name``, and the model that is equal to it to ``folder/../merged/name``."""
    policy = load_policy(model)
    add_lora(policy.model, LoraSettings(rank=2))
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    policy.save(folder / name, merge=False)
    policy.save(folder.parent / "merged" / name)


def test_each_adapter_of_the_folder_is_a_model_of_its_name_also_a_later_one(tmp_path: Path, tiny_model: Path) -> None:
    folder, names = tmp_path / "adapters", [f"live-{number}" for number in range(1, 7)]
    with serve_model(str(tiny_model), adapters=str(folder)) as served, httpx.Client(base_url=served.endpoint) as client:

        def answer(model: str) -> str:
            response = client.post("/chat/completions", json={**CHAT, "model": model}, timeout=None)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["message"]["content"])

        assert [model["id"] for model in client.get("/models").json()["data"]] == ["policy"]
        for seed, name in enumerate(names):
            write_adapter(tiny_model, folder, name, seed)
        expected = {name: generate(tmp_path / "merged" / name, "say something") for name in names}
        assert len(set(expected.values())) > 3
        for _ in range(2):  # the second round reads those again that had to make room
            assert {name: answer(name) for name in names} == expected
        assert answer("policy") == generate(tiny_model, "say something")
        assert [model["id"] for model in client.get("/models").json()["data"]] == ["policy", *names[2:], *names[:2]]
        models = client.get(served.endpoint.removesuffix("/v1") + "/health").json()["models"]
        assert list(models) == ["policy", *names[2:]], "four adapters are in memory, those used last"
        for name in ("live-7", "..", "../adapters/live-1", ".live-1.tmp"):
            refused = client.post("/chat/completions", json={**CHAT, "model": name})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        (folder / "live-1" / "adapter_model.safetensors").write_bytes(b"half")
        broken = client.post("/chat/completions", json={**CHAT, "model": "live-1"})
        assert broken.status_code == 500
        assert "live-1/adapter_model.safetensors' is damaged" in broken.json()["error"]["message"]
        assert answer("live-6") == expected["live-6"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give source, or adapters for live learning"),
        ({"adapters": "a", "source": "b", "min_reward": 1.0}, "give source, or adapters for live learning"),
        ({"adapters": "a", "min_reward": 1.0}, "adapters = 'a' needs lora"),
        ({"adapters": "a", "lora": LoraSettings()}, "give min_reward, or live learning also learns from the failures"),
    ],
    ids=["neither", "both", "no lora", "all answers"],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_served(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFT(model=str(CHECKPOINT), **settings)


async def test_nothing_is_proposed_without_a_good_answer_and_nothing_for_two_models(tmp_path: Path) -> None:
    sft = SFT(model=str(CHECKPOINT), adapters=str(tmp_path), lora=LoraSettings(), min_reward=0.5)
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="policy")
    store = agl.InMemoryLightningStore()
    rollout = await store.start_rollout({"n": 1})
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
    ended = await store.get_rollout_by_id(rollout.rollout_id)
    assert ended is not None
    assert await sft.propose(LiveExperience({"llm": llm}, [Result(ended, 0.0)], [], store)) is None
    with pytest.raises(ConfigError, match="needs one LLM among the resources; there are: writer, critic"):
        await sft.propose(LiveExperience({"writer": llm, "critic": llm}, [], [], store))
    with pytest.raises(ConfigError, match="a training needs source"):
        await sft.run()
    await store.close()


async def test_dpo_proposes_an_adapter_from_a_better_and_a_worse_answer_to_one_task(tmp_path: Path) -> None:
    dpo = DPO(model=str(CHECKPOINT), adapters=str(tmp_path), lora=LoraSettings(rank=2), train_threads=1, lr=1e-2)
    store = agl.InMemoryLightningStore()
    results = []
    for text, reward in (("5", 1.0), ("6", 0.0)):
        rollout = await store.start_rollout("2 + 3?")
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        said = {
            f"gen_ai.{name}.messages": json.dumps([{"role": role, "parts": [{"type": "text", "content": content}]}])
            for name, role, content in (("input", "user", "2 + 3?"), ("output", "assistant", text))
        }
        chat = {"gen_ai.operation.name": "chat", **said}
        await store.add_span(agl.Span.from_attributes(attributes=chat, name="chat", **ids))
        await store.update_attempt(*ids.values(), status="succeeded", reward=reward)
        ended = await store.get_rollout_by_id(rollout.rollout_id)
        assert ended is not None
        results.append(Result(ended, reward))
    llm = agl.LLM(endpoint="http://127.0.0.1:9/v1", model="policy")
    assert await dpo.propose(LiveExperience({"llm": llm}, results[:1], [], store)) is None
    proposed = await dpo.propose(LiveExperience({"llm": llm}, results, [], store))
    assert proposed == {"llm": llm.model_copy(update={"model": "live-1"})}
    weights = load_file(tmp_path / "live-1" / "adapter_model.safetensors")
    assert any(weight.abs().max() > 0 for name, weight in weights.items() if "lora_B" in name), "it was trained"
    await store.close()


def endless() -> Iterator[Any]:
    while True:
        yield from traffic(0, 1000)


@pytest.mark.soak
async def test_a_service_learns_from_its_good_answers_and_serves_the_adapter(tmp_path: Path) -> None:
    """The trial compares about 0.2 with 0.6: with these seeds, and with nearly all others, it ends in a promotion."""
    url, adapters = f"sqlite:///{tmp_path}/service.db", str(tmp_path / "adapters")
    store = agl.create_store(url)
    sft = {**SFT_SETTINGS, "adapters": adapters, "seed": 0}
    learner = agl.LiveLearning(sft, evidence=200, share=0.5, check_tasks=0, refresh_s=0.1, max_trials=1)
    learner.set_store(store)
    server = serve_model(str(CHECKPOINT), adapters=adapters)
    model = await asyncio.to_thread(server.__enter__)
    service = asyncio.create_task(serve(url, model.endpoint, endless()))
    try:
        await until(store.get_latest_resources)
        await learner.run()
    finally:
        service.cancel()
        await asyncio.gather(service, return_exceptions=True)
        await asyncio.to_thread(server.__exit__, None, None, None)
    notes = [state.note for state in await read_live_history(store)]
    latest = await store.get_latest_resources()
    assert latest is not None
    assert latest.resources["llm"] == agl.LLM(
        endpoint=model.endpoint, model="live-1", sampling_parameters={"temperature": 1.0, "max_tokens": 32}
    ), notes
    assert re.search(r"\+0\.\d+ \[.* promoted as agent@2 because it is better", notes[-1]), notes
    await store.close()
