"""The gateway and the policy backend ``vllm`` with a real server: tokens, log-probabilities, weights and adapters."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from openai import AsyncOpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import agentlightning as agl
from agentlightning_algorithms.grpo.settings import TeacherSettings
from agentlightning_algorithms.grpo.teacher import ServedTeacher
from agentlightning_algorithms.grpo.vllm_backend import VLLMBackend
from agentlightning_algorithms.shared.policy.model import Policy, load_policy, open_adapter
from agentlightning_algorithms.shared.policy.training_row import TrainingRow

MESSAGES: Any = [{"role": "user", "content": "Add 2 and 3."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'


async def ask(gateway: agl.LLMProxy, *, stream: bool = False, **options: Any) -> agl.Triplet:
    """Calls the model as an agent does, and returns the triplet of the recorded span."""
    store = gateway.store
    rollout = await store.start_rollout({})
    llm: Any = gateway.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, model="policy")
    request = {"model": "policy", "messages": MESSAGES, "max_tokens": 24, **options}
    async with AsyncOpenAI(api_key=llm.api_key, base_url=llm.get_base_url(), max_retries=0) as client:
        if stream:
            text = ""
            async for chunk in await client.chat.completions.create(**request, stream=True):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        else:
            text = (await client.chat.completions.create(**request)).choices[0].message.content or ""
    await gateway.flush()
    (span,) = (await store.query_spans(rollout.rollout_id)).items
    (triplet,) = agl.TraceToTriplet().adapt([span])
    assert (triplet.response["raw_content"][0].get("content") or "") == text
    assert triplet.metadata["complete"] is True
    return triplet


def score(policy: Policy, triplet: agl.Triplet, temperature: float = 1.0) -> list[float]:
    """Returns the trainer's log-probabilities of the recorded tokens."""
    response = list(triplet.response["token_ids"])
    row = TrainingRow(list(triplet.prompt["token_ids"]), response, [0.0] * len(response), 1.0)
    return policy.score([row], temperature)[0]


def change(policy: Policy, seed: int = 1, scale: float = 0.05) -> None:
    """Changes every weight, as a training step does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("stream", [False, True])
async def test_recorded_tokens_and_logprobs_agree_with_the_trainer(
    gateway: agl.LLMProxy, policy: Policy, stream: bool, temperature: float
) -> None:
    triplet = await ask(gateway, stream=stream, temperature=temperature, seed=4)
    prompt = policy.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(triplet.prompt["token_ids"]) == prompt
    assert len(triplet.response["token_ids"]) > 1
    assert triplet.response["logprobs"] == pytest.approx(score(policy, triplet, temperature), abs=1e-4)


async def test_a_stream_has_the_tokens_of_the_whole_answer_with_the_same_seed(gateway: agl.LLMProxy) -> None:
    whole, streamed = [await ask(gateway, stream=stream, seed=9) for stream in (False, True)]
    assert list(streamed.response["token_ids"]) == list(whole.response["token_ids"])
    assert streamed.response["logprobs"] == pytest.approx(whole.response["logprobs"], abs=1e-4)
    assert streamed.metadata["finish_reason"] == whole.metadata["finish_reason"]


async def test_calls_after_a_reload_are_sampled_with_the_new_weights(
    gateway: agl.LLMProxy, backend: VLLMBackend, policy: Policy, server: Any, tmp_path: Path
) -> None:
    before = await ask(gateway, seed=4)
    for version in (1, 2):
        change(policy, version)
        policy.save(tmp_path / str(version))
        await backend.load_weights(tmp_path / str(version), version)
        after = await ask(gateway, seed=4)
        assert after.response["logprobs"] == pytest.approx(score(policy, after), abs=1e-4)
    old = load_policy(server.model)
    assert max(abs(new - was) for new, was in zip(score(policy, before), score(old, before), strict=True)) > 0.05


async def count_running(server: Any) -> float:
    """Returns the number of calls that vLLM is sampling."""
    url = server.endpoint.removesuffix("/v1") + "/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        found = re.search(r"^vllm:num_requests_running\{.*\} (.*)$", await response.text(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_calls_during_a_reload_use_either_the_old_or_the_new_weights(
    gateway: agl.LLMProxy, backend: VLLMBackend, policy: Policy, server: Any, tmp_path: Path
) -> None:
    old = load_policy(server.model)
    change(policy)
    policy.save(tmp_path / "new")
    triplets: list[agl.Triplet] = []
    is_reloaded = asyncio.Event()

    async def call_repeatedly(worker: int) -> None:
        """Calls until the weights are reloaded, so that calls are running when the reload begins, and once more."""
        for seed in itertools.count(1000 * worker):
            is_last = is_reloaded.is_set()
            triplets.append(await ask(gateway, seed=seed, max_tokens=300))
            if is_last:
                break

    async with asyncio.TaskGroup() as group:
        for worker in range(8):
            group.create_task(call_repeatedly(worker))
        while await count_running(server) < 2:  # noqa: ASYNC110 # no event reports it
            await asyncio.sleep(0.01)
        await backend.load_weights(tmp_path / "new", 1)
        is_reloaded.set()
    sampled_by = set()
    for triplet in triplets:
        logprobs = triplet.response["logprobs"]
        gaps = [
            max(abs(own - told) for own, told in zip(score(each, triplet), logprobs, strict=True))
            for each in (old, policy)
        ]
        assert min(gaps) < 1e-4, "an answer mixes two versions of the weights"
        sampled_by.add("old" if gaps[0] < gaps[1] else "new")
    assert sampled_by == {"old", "new"}


async def test_weights_that_cannot_be_read_leave_the_server_running(
    gateway: agl.LLMProxy, backend: VLLMBackend, policy: Policy, tmp_path: Path
) -> None:
    with pytest.raises(agl.ConfigError, match="refused weights version 3"):
        await backend.load_weights(tmp_path / "nothing", 3)
    triplet = await ask(gateway, seed=1)
    assert triplet.response["logprobs"] == pytest.approx(score(policy, triplet), abs=1e-4)


async def test_tied_embeddings_are_refused_on_a_cpu(backend: VLLMBackend, policy: Policy, tmp_path: Path) -> None:
    policy.model.config.tie_word_embeddings = True
    policy.model.tie_weights()
    policy.save(tmp_path / "tied")
    with pytest.raises(agl.ConfigError, match="tie_word_embeddings.*backend: transformers"):
        await backend.load_weights(tmp_path / "tied", 1)


def save_adapter(model: Path, directory: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(directory)


async def test_an_adapter_is_selected_by_name_and_can_be_replaced(
    gateway: agl.LLMProxy, backend: VLLMBackend, policy: Policy, server: Any, tmp_path: Path
) -> None:
    entry = dict(backend.model_entry)
    gateway.update_model_list([{**entry, "model": "writer"}])
    changes = []
    for version in (1, 2):
        directory = tmp_path / str(version)
        save_adapter(server.model, directory, version)
        await backend.load_adapter("writer", directory, version)
        triplet = await ask(gateway, seed=4)
        own = open_adapter(load_policy(server.model), directory)
        own.load_weights(directory)
        assert triplet.response["logprobs"] == pytest.approx(score(own, triplet), abs=1e-4)
        changes.append(max(abs(a - b) for a, b in zip(score(own, triplet), score(policy, triplet), strict=True)))
    assert min(changes) > 0.05, "the adapter has no effect"
    gateway.update_model_list([entry])
    triplet = await ask(gateway, seed=4)
    assert triplet.response["logprobs"] == pytest.approx(score(policy, triplet), abs=1e-4)


def teach(policy: Policy, prompt: list[int], answer: str) -> None:
    """Trains the model to give one answer."""
    tokens = policy.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*prompt, *tokens]])
    labels = torch.tensor([[-100] * len(prompt) + tokens])
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = policy.model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.005:
            return
    raise AssertionError(f"the loss is {loss.item()}")


async def test_a_trained_tool_call_is_parsed_and_recorded_with_its_tokens(
    gateway: agl.LLMProxy, backend: VLLMBackend, policy: Policy, tmp_path: Path
) -> None:
    options = {"tools": [TOOL], "max_tokens": 120, "seed": 0}
    first = await ask(gateway, **{**options, "max_tokens": 1})
    await asyncio.to_thread(teach, policy, list(first.prompt["token_ids"]), TOOL_CALL)
    policy.save(tmp_path / "taught")
    await backend.load_weights(tmp_path / "taught", 1)
    for stream in (False, True):
        triplet = await ask(gateway, stream=stream, **options)
        (call,) = triplet.response["raw_content"][0]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert call["function"]["arguments"].replace(" ", "") == '{"a":2,"b":3}'
        assert triplet.metadata["finish_reason"] == "tool_calls"
        assert policy.tokenizer.decode(triplet.response["token_ids"]) == TOOL_CALL
        assert triplet.response["logprobs"] == pytest.approx(score(policy, triplet), abs=1e-4)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thoughts_of_earlier_answers_reach_the_chat_template(
    gateway: agl.LLMProxy, policy: Policy, name: str
) -> None:
    said = [*MESSAGES, {"role": "assistant", "content": "5", name: "Hm."}, *MESSAGES]
    triplet = await ask(gateway, messages=said)
    assert "<think>Hm.</think>5" in policy.tokenizer.decode(triplet.prompt["token_ids"])


async def test_a_teacher_served_by_vllm_scores_like_the_same_model_in_this_process(
    backend: VLLMBackend, policy: Policy, server: Any
) -> None:
    settings = TeacherSettings(model="policy", endpoint=server.endpoint)
    rows = [
        TrainingRow([5, 6, 7], [9, 8, 7, 6], [0.0] * 4, 1.0),
        TrainingRow(list(range(20, 60)), [1, 2, 3], [0.0] * 3, 1.0, mask=[1, 0, 1]),
    ]
    teacher = await asyncio.to_thread(ServedTeacher.connect, settings, policy)
    for told, own in zip(await asyncio.to_thread(teacher.score, rows), policy.score(rows), strict=True):
        assert told == pytest.approx(own, abs=1e-4)
