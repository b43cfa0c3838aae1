from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.model.checkpoint import atomic_directory, recover_directory
from agentlightning_algorithms.grpo.model.policy import Policy, batch_by_tokens, collate, load_policy
from agentlightning_algorithms.grpo.training_row import TrainingRow

ROWS = [
    TrainingRow(prompt_ids=[5, 6, 7], response_ids=[8, 9], logprobs=[0, 0], advantage=1),
    TrainingRow(prompt_ids=[5], response_ids=[1, 2, 3, 4], logprobs=[0, 0, 0, 0], advantage=1),
    TrainingRow(prompt_ids=list(range(40)), response_ids=[258], logprobs=[0], advantage=1),
]


def naive_logprobs(model: PreTrainedModel, row: TrainingRow, temperature: float) -> list[float]:
    """One row at a time, every logit computed, no padding."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logprobs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    first = len(row.prompt_ids) - 1
    return [logprobs[first + t, token].item() for t, token in enumerate(row.response_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_batched_logprobs_equal_those_of_each_row_alone(
    tiny_policy: Policy, temperature: float, max_tokens: int
) -> None:
    scores = tiny_policy.score(ROWS, temperature, max_tokens=max_tokens)
    for row, score in zip(ROWS, scores, strict=True):
        assert score == pytest.approx(naive_logprobs(tiny_policy.model, row, temperature), abs=1e-5)


def test_entropy_is_that_of_the_distribution_at_each_response_token(tiny_policy: Policy) -> None:
    _, entropy_BT = tiny_policy.token_logprobs(collate(ROWS))
    logits = tiny_policy.model(torch.tensor([[5, 6, 7, 8]])).logits[0, 2:]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_BT[0, :2], expected, atol=1e-5, rtol=1e-5)
    assert entropy_BT[0, 2:].tolist() == [0, 0]


def test_a_head_that_caps_its_logits_is_not_bypassed() -> None:
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, final_logit_softcapping=0.05,
        attn_logit_softcapping=None, initializer_range=1.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    policy = Policy(model, cast(Any, SimpleNamespace(eos_token_id=1)))
    row = TrainingRow(prompt_ids=[5, 6], response_ids=[7], logprobs=[0], advantage=0)
    assert policy.score([row])[0] == pytest.approx(naive_logprobs(model, row, 1.0), abs=1e-5)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.integers(0, 100))
def test_batches_hold_every_item_once_and_keep_to_the_budget(
    lengths: list[int], max_tokens: int, max_padding: int
) -> None:
    batches = batch_by_tokens(lengths, max_tokens, max_padding=max_padding)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or width * len(batch) <= max_tokens
        assert sum(width - lengths[i] for i in batch) <= max_padding


def test_saved_policies_are_ordinary_transformers_models(tiny_policy: Policy, tmp_path: Path) -> None:
    tiny_policy.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in tiny_policy.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert load_policy(tmp_path).tokenizer.chat_template == tiny_policy.tokenizer.chat_template


def test_weights_are_copied_in_whole_or_not_at_all(tiny_policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in tiny_policy.model.state_dict().items()}
    with torch.no_grad():
        for parameter in tiny_policy.model.parameters():
            parameter.add_(1.0)
    changed = tiny_policy.model.state_dict()["model.norm.weight"].clone()
    stored = load_file(tiny_model / "model.safetensors")
    fewer = {name: value for name, value in stored.items() if "layers.1" not in name}
    save_file(fewer, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing \['model.layers.1"):
        tiny_policy.load_weights(tmp_path)
    save_file({**stored, "model.norm.weight": torch.zeros(7)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"another shape \['model.norm.weight'\]"):
        tiny_policy.load_weights(tmp_path)
    whole = (tiny_model / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="is damaged"):
        tiny_policy.load_weights(tmp_path)
    with pytest.raises(ConfigError, match="no \\*.safetensors"):
        tiny_policy.load_weights(tmp_path / "nowhere")
    assert torch.equal(tiny_policy.model.state_dict()["model.norm.weight"], changed)
    tiny_policy.load_weights(tiny_model)
    for name, value in tiny_policy.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_missing_model_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a causal language model from"):
        load_policy(tmp_path)
    with pytest.raises(ConfigError, match="dtype = 'int4'; allowed: float32"):
        load_policy(tmp_path, dtype="int4")


def test_a_directory_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"

    def write(text: str) -> None:
        with atomic_directory(target) as scratch:
            (scratch / "file").write_text(text)
            if text == "bad":
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write("bad")
    assert list(tmp_path.iterdir()) == []
    write("first")
    with pytest.raises(OSError, match="disk full"):
        write("bad")
    assert (target / "file").read_text() == "first"
    write("second")
    assert (target / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [target]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    old = tmp_path / "checkpoint.old"
    old.mkdir()
    (old / "file").write_text("first")
    target = recover_directory(tmp_path / "checkpoint")
    assert (target / "file").read_text() == "first"


def test_scratch_directories_of_killed_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive = tmp_path / f".checkpoint.{ended.pid}.tmp", tmp_path / f".checkpoint.{os.getppid()}.tmp"
    dead.mkdir()
    alive.mkdir()
    with atomic_directory(tmp_path / "checkpoint") as scratch:
        (scratch / "file").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", alive.name}
