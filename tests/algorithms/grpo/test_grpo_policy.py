from __future__ import annotations

import textwrap
from dataclasses import replace
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
from agentlightning.run.directory import atomic_directory, recover_directory
from agentlightning_algorithms.shared.policy.draw import SamplingParams
from agentlightning_algorithms.shared.policy.model import Policy, batch_by_tokens, collate, load_policy
from agentlightning_algorithms.shared.policy.sampler import Sampler
from agentlightning_algorithms.shared.policy.training_row import Distribution, TrainingRow
from tests.source import run_python

ROWS = [
    TrainingRow(prompt_ids=[5, 6, 7], response_ids=[8, 9], logprobs=[0, 0], advantage=1),
    TrainingRow(prompt_ids=[5], response_ids=[1, 2, 3, 4], logprobs=[0, 0, 0, 0], advantage=1),
    TrainingRow(prompt_ids=list(range(40)), response_ids=[258], logprobs=[0], advantage=1),
]


def naive_logprobs(model: PreTrainedModel, row: TrainingRow, temperature: float) -> list[float]:
    """Returns the log-probabilities of a row computed on its own, from all logits and without padding."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logprobs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    first = len(row.prompt_ids) - 1
    return [logprobs[first + t, token].item() for t, token in enumerate(row.response_ids)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_batched_logprobs_equal_the_logprobs_of_each_row_on_its_own(
    tiny_policy: Policy, temperature: float, max_tokens: int
) -> None:
    scores = tiny_policy.score(ROWS, temperature, max_tokens=max_tokens)
    for row, score in zip(ROWS, scores, strict=True):
        assert score == pytest.approx(naive_logprobs(tiny_policy.model, row, temperature), abs=1e-5)


def test_entropy_is_computed_from_the_distribution_at_each_response_token(tiny_policy: Policy) -> None:
    _, entropy_BT = tiny_policy.token_logprobs(collate(ROWS))
    logits = tiny_policy.model(torch.tensor([[5, 6, 7, 8]])).logits[0, 2:]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_BT[0, :2], expected, atol=1e-5, rtol=1e-5)
    assert entropy_BT[0, 2:].tolist() == [0, 0]


def test_the_logit_cap_of_a_model_head_is_applied() -> None:
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, final_logit_softcapping=0.05,
        attn_logit_softcapping=None, initializer_range=1.0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    policy = Policy(model, cast(Any, SimpleNamespace(eos_token_id=1)))
    row = TrainingRow(prompt_ids=[5, 6], response_ids=[7], logprobs=[0], advantage=0)
    assert policy.score([row])[0] == pytest.approx(naive_logprobs(model, row, 1.0), abs=1e-5)


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(1, 20_000))
def test_batches_hold_every_item_once_and_keep_to_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = batch_by_tokens(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or width * len(batch) <= max_tokens
        assert sum(width - lengths[i] for i in batch) <= max(256, width * len(batch) // 10)


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_batches_are_well_filled_for_items_of_any_length(scale: int) -> None:
    lengths = [scale * (30 + i) for i in range(40)]
    batches = batch_by_tokens(lengths, 400 * scale)
    assert len(batches) <= 1.3 * sum(lengths) / (400 * scale)


def rows_with_distributions(policy: Policy) -> list[TrainingRow]:
    """Returns rows that were each sampled with different parameters."""
    sampler = Sampler(policy, seed=1)
    try:
        found = []
        for i, own in enumerate(
            [Distribution(0.5), Distribution(1.3, 0.7), Distribution(1.0, 0.9, 5), Distribution(0.0)]
        ):
            params = SamplingParams(max_tokens=20, seed=i, **own._asdict())
            answer = sampler.submit([1, 2, 3, i], params).result()
            logprobs = [token.logprob for token in answer.tokens]
            found.append(TrainingRow([1, 2, 3, i], answer.token_ids, logprobs, 1.0, distribution=own))
        return found
    finally:
        sampler.close()


def test_a_row_is_scored_with_the_distribution_it_was_sampled_from(tiny_policy: Policy) -> None:
    rows = rows_with_distributions(tiny_policy)
    plain = [5, 6], [7, 8], [0.0, 0.0]
    rows.append(TrainingRow(*plain, 1.0))
    scores = tiny_policy.score(rows, 0.7)
    for row, score in zip(rows[:-1], scores, strict=False):
        assert score == pytest.approx(row.logprobs, abs=1e-4)
    assert scores[-1] == pytest.approx(tiny_policy.score([TrainingRow(*plain, 1.0)], 0.7)[0], abs=1e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_scoring_a_few_tokens_at_a_time_gives_the_same_gradient(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch, entropy_gradient: bool
) -> None:
    rows = rows_with_distributions(tiny_policy)
    rows += [replace(row, distribution=None) for row in rows]
    batch = collate(rows)

    def gradient() -> torch.Tensor:
        tiny_policy.model.zero_grad()
        logprob_BT, entropy_BT = tiny_policy.token_logprobs(batch, 0.7, entropy_gradient=entropy_gradient)
        loss = (logprob_BT * torch.arange(logprob_BT.shape[1])).mean()
        if entropy_gradient:
            loss = loss + entropy_BT.square().mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in tiny_policy.model.parameters() if p.grad is not None])

    whole = gradient()
    assert whole.isfinite().all()
    monkeypatch.setattr("agentlightning_algorithms.shared.policy.model._CHUNK_ELEMENTS", 7 * 259)
    torch.testing.assert_close(gradient(), whole, atol=1e-6 * float(whole.abs().max()), rtol=1e-6)


def test_logits_are_made_for_a_few_tokens_at_a_time_and_made_again_for_the_gradient(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    read_out = tiny_policy._read_out
    monkeypatch.setattr(tiny_policy, "_read_out", lambda states: (made.append(len(states)), read_out(states))[1])
    monkeypatch.setattr("agentlightning_algorithms.shared.policy.model._CHUNK_ELEMENTS", 7 * 259)
    tiny_policy.token_logprobs(collate([TrainingRow([1], [2] * 35, [0.0] * 35, 1.0)] * 2))[0].mean().backward()
    assert made == [7] * 20


@pytest.mark.soak
def test_an_update_at_a_large_vocabulary_keeps_few_logits_in_memory() -> None:
    """With 256 sampled tokens per row and 152k words, a copy of all logits takes 5 GB; backward needs several."""
    program = """
        import resource, torch
        from types import SimpleNamespace
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from agentlightning_algorithms.shared.policy.model import Policy, collate
        from agentlightning_algorithms.shared.policy.training_row import TrainingRow

        size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        config = Qwen2Config(vocab_size=151_936, num_key_value_heads=1, max_position_embeddings=4096, **size)
        policy = Policy(Qwen2ForCausalLM(config), SimpleNamespace(eos_token_id=1))
        rows = [TrainingRow([1], [2] * 256, [0.0] * 256, 1.0)] * 32

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

        before = peak()
        logprob_BT, _ = policy.token_logprobs(collate(rows))
        logprob_BT.mean().backward()
        print(peak() - before)
        """
    output = run_python("-c", textwrap.dedent(program))
    assert float(output) < 3.0


def test_saved_policies_are_ordinary_transformers_models(tiny_policy: Policy, tmp_path: Path) -> None:
    tiny_policy.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in tiny_policy.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert load_policy(tmp_path).tokenizer.chat_template == tiny_policy.tokenizer.chat_template


def test_weights_are_written_in_the_dtype_of_their_reader(tiny_policy: Policy, tmp_path: Path) -> None:
    tiny_policy.save(tmp_path / "whole")
    tiny_policy.save(tmp_path / "half", dtype="bfloat16")
    whole, half = (tiny_policy.read_weights(tmp_path / name) for name in ("whole", "half"))
    assert whole.keys() == half.keys(), "tied weights are written once"
    for name, value in half.items():
        assert torch.equal(value, whole[name].to(torch.bfloat16)), name


def test_weights_are_loaded_completely_or_not_at_all(tiny_policy: Policy, tiny_model: Path, tmp_path: Path) -> None:
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


def test_a_directory_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
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


def test_a_kill_between_the_two_renames_of_a_directory_loses_nothing(tmp_path: Path) -> None:
    old = tmp_path / "checkpoint.old"
    old.mkdir()
    (old / "file").write_text("first")
    target = recover_directory(tmp_path / "checkpoint")
    assert (target / "file").read_text() == "first"


def test_the_scratch_directory_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".checkpoint.tmp"
    left.mkdir()
    (left / "half").touch()
    with atomic_directory(tmp_path / "checkpoint") as scratch:
        (scratch / "file").write_text("new")
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["file"]
    assert not left.exists()
