from __future__ import annotations

import logging
import math
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError, PluginError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import bind_settings
from agentlightning_algorithms.grpo.algorithm import GRPO
from agentlightning_algorithms.grpo.command import export_model
from agentlightning_algorithms.grpo.settings import CheckpointSettings, ExperienceSettings
from agentlightning_algorithms.offline.dpo import DPO
from agentlightning_algorithms.offline.training import SFT
from agentlightning_algorithms.shared.advantage import Scored
from agentlightning_algorithms.shared.policy.lora import add_lora
from agentlightning_algorithms.shared.policy.loss import LossBatch, Surrogate, ppo
from agentlightning_algorithms.shared.policy.model import Policy, load_policy
from agentlightning_algorithms.shared.policy.settings import Aggregation, LoraSettings, UpdateSettings
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater


def make_rows(policy: Policy, count: int, seed: int = 0) -> list[TrainingRow]:
    """Returns random rows whose log-probabilities differ a little from the policy's, so that ratios differ from 1."""
    rng = random.Random(seed)
    rows = [
        TrainingRow(
            [rng.randrange(256) for _ in range(rng.randint(1, 20))],
            [rng.randrange(256) for _ in range(rng.randint(1, 6))],
            [],
            rng.gauss(0, 1),
        )
        for _ in range(count)
    ]
    return [
        replace(row, logprobs=[value + rng.gauss(0, 0.2) for value in score])
        for row, score in zip(rows, policy.score(rows), strict=True)
    ]


def gradients(policy: Policy, rows: list[TrainingRow], **options: Any) -> tuple[list[Tensor], dict[str, float]]:
    """Returns the gradients and metrics of one optimizer step over ``rows``; the weights stay as they are."""
    updater = Updater(policy, UpdateSettings(lr=1e-30, max_grad_norm=1e9, **options))
    caught: list[Tensor] = []

    def catch(optimizer: torch.optim.Optimizer, *_: object) -> None:
        caught.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

    updater._optimizer.register_step_pre_hook(catch)
    metrics = updater.update(rows)
    return caught, metrics


def assert_same_gradients(left: list[Tensor], right: list[Tensor]) -> None:
    """Checks equality up to the rounding of float32, which depends on the order of sums."""
    assert len(left) == len(right)
    if not left:  # no token was trusted
        return
    a, b = (torch.cat([gradient.flatten().double() for gradient in gradients]) for gradients in (left, right))
    assert (a - b).norm() <= 1e-5 * max(1e-3, b.norm())


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


same_policy = settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


EVERYTHING = [
    {"objective": "ppo", "clip_high": 0.28, "kl_coefficient": 0.1},
    {"objective": "gspo", "clip_low": 0.01, "clip_high": 0.02, "entropy_coefficient": 0.1},
    {"objective": "cispo", "old_logprobs": "trainer", "importance_weights": "token", "trust_mask": "token"},
    {"objective": "ppo", "old_logprobs": "trainer", "importance_weights": "sequence", "importance_lower": 0.3},
    {"objective": "ppo", "old_logprobs": "trainer", "trust_mask": "sequence-mean", "gradient_checkpointing": True},
]


def masked(rows: list[TrainingRow]) -> list[TrainingRow]:
    """Joins rows to rollouts in pairs; in every third row masks the second token and varies the advantage by token."""
    return [
        replace(
            row,
            rollout=i // 2,
            mask=None if i % 3 else [int(t != 1) for t in range(len(row.response_ids))],
            advantage=row.advantage if i % 3 else [0.5 - t for t in range(len(row.response_ids))],
        )
        for i, row in enumerate(rows)
    ]


@given(
    st.integers(1, 7),
    st.integers(0, 100),
    st.integers(1, 120),
    st.sampled_from(get_args(Aggregation)),
    st.sampled_from(EVERYTHING),
)
@same_policy
def test_micro_batches_do_not_change_the_gradient(
    tiny_policy: Policy, count: int, seed: int, budget: int, aggregation: Aggregation, options: dict[str, Any]
) -> None:
    rows = masked(make_rows(tiny_policy, count, seed))
    options = {**options, "aggregation": aggregation, "horizon": 6}
    whole, _ = gradients(tiny_policy, rows, **options)
    cut, _ = gradients(tiny_policy, rows, max_tokens_per_microbatch=budget, **options)
    assert_same_gradients(cut, whole)


@given(st.integers(0, 100), st.randoms(use_true_random=False), st.sampled_from(EVERYTHING))
@same_policy
def test_the_order_of_rows_does_not_change_the_gradient(
    tiny_policy: Policy, seed: int, order: random.Random, options: dict[str, Any]
) -> None:
    rows = masked(make_rows(tiny_policy, 6, seed))
    shuffled = order.sample(rows, len(rows))
    left, right = gradients(tiny_policy, shuffled, **options)[0], gradients(tiny_policy, rows, **options)[0]
    assert_same_gradients(left, right)


@given(st.integers(0, 100), st.integers(1, 60), st.sampled_from(EVERYTHING))
@same_policy
def test_padding_does_not_change_the_gradient(
    tiny_policy: Policy, seed: int, length: int, options: dict[str, Any]
) -> None:
    rows = masked(make_rows(tiny_policy, 4, seed))
    wide = TrainingRow([1] * length, [2] * length, [-1.0] * length, advantage=3.0, weight=0.0)
    left, right = gradients(tiny_policy, [*rows, wide], **options)[0], gradients(tiny_policy, rows, **options)[0]
    assert_same_gradients(left, right)


def test_a_row_of_weight_two_counts_as_two_rows(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 4)
    weighted = [replace(rows[0], weight=2.0), *rows[1:]]
    assert_same_gradients(gradients(tiny_policy, weighted)[0], gradients(tiny_policy, [rows[0], *rows])[0])


def test_the_gradient_agrees_with_the_clipped_loss_written_out(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 5)
    ours, metrics = gradients(tiny_policy, rows)
    losses = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logprobs = tiny_policy.model(ids).logits[0].log_softmax(-1)
        for t, (token, old) in enumerate(zip(row.response_ids, row.logprobs, strict=True)):
            ratio = (logprobs[len(row.prompt_ids) - 1 + t, token] - old).exp()
            losses.append(torch.maximum(-row.advantage * ratio, -row.advantage * ratio.clamp(0.8, 1.2)))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert_same_gradients(ours, [p.grad for p in tiny_policy.model.parameters() if p.grad is not None])


def test_merged_calls_have_the_gradient_of_separate_rows(tiny_policy: Policy) -> None:
    """Compares two calls, the second of which continues the first, as two rows and as one row with a mask."""
    calls = [TrainingRow([1, 2, 3], [4, 5], [], 0.7), TrainingRow([1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11], [], -0.4)]
    calls = [
        replace(row, logprobs=[v + 0.1 for v in score])
        for row, score in zip(calls, tiny_policy.score(calls), strict=True)
    ]
    merged = TrainingRow(
        [1, 2, 3],
        [4, 5, 6, 7, 8, 9, 10, 11],
        [*calls[0].logprobs, 0.0, 0.0, 0.0, *calls[1].logprobs],
        [0.7] * 5 + [-0.4] * 3,
        mask=[1, 1, 0, 0, 0, 1, 1, 1],
    )
    apart, metrics = gradients(tiny_policy, calls)
    joined, joined_metrics = gradients(tiny_policy, [merged])
    assert_same_gradients(joined, apart)
    assert joined_metrics["response_tokens"] == metrics["response_tokens"] == 5
    assert joined_metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert tiny_policy.score([merged])[0][2:5] == [0.0, 0.0, 0.0]


def test_kl_and_entropy_terms_are_added_to_the_loss_with_their_coefficients(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 3)
    with torch.no_grad():
        before = [p.clone() for p in tiny_policy.model.parameters()]
    settings = UpdateSettings(
        lr=1e-30, max_grad_norm=1e9, kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.2
    )
    updater = Updater(tiny_policy, settings)
    with torch.no_grad():  # the policy moves away from the reference
        for p in tiny_policy.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    moved = weights(tiny_policy)
    new = tiny_policy.score(rows)
    plain = Updater(tiny_policy, UpdateSettings(lr=1e-30)).update(rows)
    for name, value in weights(tiny_policy).items():
        assert torch.equal(value, moved[name])
    metrics = updater.update(rows)
    with torch.no_grad():
        for p, value in zip(tiny_policy.model.parameters(), before, strict=True):
            p.copy_(value)
    reference = tiny_policy.score(rows)
    kl = [0.5 * (a - b) ** 2 for xs, ys in zip(new, reference, strict=True) for a, b in zip(xs, ys, strict=True)]
    expected = plain["loss"] + 0.3 * sum(kl) / len(kl) - 0.2 * plain["entropy"]
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["reference_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)


def test_coefficients_of_kl_and_entropy_follow_their_schedules(tiny_policy: Policy) -> None:
    given = UpdateSettings(
        kl_coefficient=0.4, kl_schedule="linear", entropy_coefficient=0.2, entropy_schedule="cosine", total_updates=5
    )
    found = [given.coefficients_at(update) for update in (0, 2, 4, 9)]
    assert found == [pytest.approx(pair) for pair in ((0.4, 0.2), (0.2, 0.1), (0.0, 0.0), (0.0, 0.0))]
    rows = make_rows(tiny_policy, 3)
    plain, _ = gradients(tiny_policy, rows)
    bonus, _ = gradients(tiny_policy, rows, entropy_coefficient=0.2)
    for update, expected in ((0, bonus), (4, plain)):
        updater = Updater(
            tiny_policy, UpdateSettings(entropy_coefficient=0.2, entropy_schedule="linear", total_updates=5)
        )
        updater.updates = update
        updater.forward_backward(rows)
        assert_same_gradients([p.grad for p in updater._parameters if p.grad is not None], expected)
        tiny_policy.model.zero_grad()
    with pytest.raises(ConfigError, match="kl_schedule = 'linear' needs total_updates"):
        Updater(tiny_policy, UpdateSettings(kl_coefficient=0.1, kl_schedule="linear"))


def test_tokens_on_which_sampler_and_trainer_disagree_are_weighted_and_masked(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 6)
    exact = [replace(row, logprobs=score) for row, score in zip(rows, tiny_policy.score(rows), strict=True)]
    wrong = replace(exact[0], logprobs=[v + 5.0 for v in exact[0].logprobs])  # e^5 times likelier for the sampler
    options: dict[str, Any] = {"old_logprobs": "trainer"}
    masks, metrics = gradients(tiny_policy, [wrong, *exact[1:]], trust_mask="token", **options)
    assert_same_gradients(masks, gradients(tiny_policy, exact[1:], **options)[0])
    n = sum(len(row.response_ids) for row in rows)
    assert metrics["trusted_fraction"] == pytest.approx(1 - len(wrong.response_ids) / n)
    _, metrics = gradients(tiny_policy, [wrong], importance_weights="token", **options)
    assert metrics["importance_weight"] == pytest.approx(math.exp(-5.0), rel=1e-3)
    _, metrics = gradients(tiny_policy, [wrong], importance_weights="token", importance_lower=0.5, **options)
    assert (metrics["importance_weight"], metrics["importance_weight_held"]) == (0.0, 1.0)
    assert metrics["grad_norm"] == 0.0


def test_gradient_checkpointing_without_dropout_gives_the_same_gradient(tiny_model: Path) -> None:
    policy = load_policy(tiny_model)
    rows = make_rows(policy, 4)
    plain, _ = gradients(policy, rows)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        recomputed, _ = gradients(policy, rows, gradient_checkpointing=True)
    with_checkpoints = sum(saved)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        gradients(load_policy(tiny_model), rows)
    assert_same_gradients(recomputed, plain)
    assert with_checkpoints != sum(saved)  # checkpointing stored other tensors


def test_in_bfloat16_the_weights_stay_in_float32(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 4)
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-6, old_logprobs="trainer"), autocast=True)
    before = weights(tiny_policy)
    metrics = updater.update(rows)
    assert 1e-4 < metrics["logprob_gap_max"] < 2.0
    assert {p.dtype for p in tiny_policy.model.parameters()} == {torch.float32}
    assert any(not torch.equal(before[name], value) for name, value in weights(tiny_policy).items())


def test_lora_trains_only_its_adapters_and_resumes_bit_identically(tiny_model: Path, tmp_path: Path) -> None:
    def make() -> Policy:
        torch.manual_seed(5)
        policy = load_policy(tiny_model)
        add_lora(policy.model, LoraSettings(rank=4, alpha=8))
        return policy

    options = UpdateSettings(lr=1e-2, minibatches=2, kl_coefficient=0.1)
    batches = [make_rows(load_policy(tiny_model), 6, seed) for seed in range(3)]
    straight = Updater(make(), options)
    for batch in batches[:2]:
        straight.update(batch)
    straight.save(tmp_path / "step-2")
    assert (tmp_path / "step-2" / "adapter_model.safetensors").is_file()
    expected = straight.update(batches[2])
    torch.manual_seed(99)
    policy = load_policy(tiny_model)
    add_lora(policy.model, LoraSettings(rank=4, alpha=8))
    resumed = Updater(policy, options)
    resumed.load(tmp_path / "step-2")
    assert resumed.update(batches[2])["loss"] == expected["loss"]
    base = load_policy(tiny_model).model.state_dict()
    for name, value in straight.policy.model.state_dict().items():
        if ".lora_" in name:
            assert torch.equal(value, policy.model.state_dict()[name])
        else:
            assert torch.equal(value, base[name.replace(".base_layer", "")])
    ids = torch.tensor([[1, 2, 3, 4]])
    policy.save(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids).logits, policy.model(ids).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(merged(ids).logits, load_policy(tiny_model).model(ids).logits, atol=1e-3)
    load_policy(tiny_model).load_weights(tmp_path / "merged")  # as the policy server does
    other = load_policy(tiny_model)
    add_lora(other.model, LoraSettings(rank=8))
    with pytest.raises(ConfigError, match="resume with the same lora settings"):
        Updater(other, options).load(tmp_path / "step-2")


@pytest.mark.parametrize(("size", "expected"), [(10**3, True), (10**9, False)])
def test_large_models_recompute_activations_by_default(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch, size: int, expected: bool
) -> None:
    monkeypatch.setattr("agentlightning_algorithms.shared.policy.updater._LARGE", size)
    Updater(tiny_policy)
    layers = [m for m in tiny_policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert layers
    assert {bool(layer.gradient_checkpointing and layer.training) for layer in layers} == {expected}


def test_gradients_accumulate_until_the_optimizer_step(tiny_policy: Policy, tiny_model: Path) -> None:
    rows = make_rows(tiny_policy, 4)
    other = load_policy(tiny_model)
    options = UpdateSettings(lr=1e-3, aggregation="token-sum")
    parts, whole = Updater(tiny_policy, options), Updater(other, options)
    reported = [parts.forward_backward(part)["loss"] for part in (rows[:2], rows[2:])]
    at_once = whole.forward_backward(rows)["loss"]
    for one, two in zip(tiny_policy.model.parameters(), other.model.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(one.grad, two.grad, atol=1e-5, rtol=1e-4)
    metrics = parts.optim_step()
    assert "logprob_gap_max" not in metrics, "forward_backward does not measure the gap"
    assert sum(reported) == pytest.approx(at_once, abs=1e-4)
    assert metrics["loss"] == pytest.approx(at_once, abs=1e-4)
    assert metrics["grad_norm"] == pytest.approx(whole.optim_step()["grad_norm"], rel=1e-4)
    assert (parts.updates, metrics["rows"], metrics["optimizer_steps"]) == (1, 4.0, 1.0)
    assert parts.optim_step()["optimizer_steps"] == 0.0  # no gradient was added since the last step


def test_the_loss_passed_to_forward_backward_replaces_the_objective(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 2)
    updater = Updater(tiny_policy)
    found = updater.forward_backward(rows, "cross_entropy")["loss"]
    ones = [replace(row, advantage=1.0) for row in rows]
    count = sum(row.n_sampled for row in rows)
    by_hand = [
        -a * v for row in rows for a, v in zip(row.advantages, tiny_policy.score([row])[0], strict=True)
    ]  # fmt: skip
    assert found == pytest.approx(sum(by_hand) / count, abs=1e-4)
    likelihood = Updater(tiny_policy).forward_backward(ones, "cross_entropy")["loss"]
    assert likelihood == pytest.approx(-sum(sum(s) for s in tiny_policy.score(ones)) / count, abs=1e-4)
    with pytest.raises(PluginError, match="crossentropy"):
        updater.forward_backward(rows, "crossentropy")


def read_example() -> dict[str, Any]:
    """Executes the example plugin of docs/plugins/training.md and returns its names."""
    page = (Path(__file__).parents[3] / "docs" / "plugins" / "training.md").read_text(encoding="utf-8")
    code = next(block for block in page.split("```")[1::2] if "def soft_gate" in block).removeprefix("python")
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 20
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    return names


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = read_example()
    for name in ("soft_gate", "maxrl"):
        monkeypatch.setattr(sys.modules[__name__], name, names[name], raising=False)
    manager, plugin = get_manager(), SimpleNamespace(components=names["components"])
    manager.register(plugin, "test-losses")
    yield
    manager._pluggy.unregister(plugin)
    del manager.plugins["test-losses"], manager._offers["policy_loss", "soft_gate"]
    del manager._offers["advantage", "maxrl"]


def test_a_plugin_can_add_a_loss_and_an_advantage(tiny_policy: Policy, third_party: None) -> None:
    (row,) = make_rows(tiny_policy, 1)
    own = replace(row, advantage=1.0, logprobs=tiny_policy.score([row])[0])
    soft, _ = gradients(tiny_policy, [own], objective="soft_gate")
    ppo, _ = gradients(tiny_policy, [own], objective="ppo")
    assert_same_gradients(soft, ppo)  # on policy, the slope of the gate is 1
    soft, _ = gradients(tiny_policy, [replace(own, logprobs=[v - 1.0 for v in own.logprobs])], objective="soft_gate")
    assert any(value.abs().max() > 0 for value in soft), "the gate does not cut the gradient off"
    algorithm = GRPO(model="nowhere", experience=ExperienceSettings(estimator="maxrl"))
    maxrl = get_manager().get("advantage", algorithm.experience.estimator)
    items = [Scored(value, "g", rollout) for rollout, value in enumerate([1.0, 0.0, 0.0, 0.0])]
    assert maxrl(items, std_floor=0.01) == [3.0, -1.0, -1.0, -1.0]


def test_an_unknown_part_of_a_training_or_setting_of_it_is_refused_with_a_suggestion() -> None:
    with pytest.raises(PluginError, match="no policy_loss named 'pp0'. Did you mean 'ppo'"):
        UpdateSettings(objective="pp0")
    with pytest.raises(PluginError, match="no advantage named 'grp0'. Did you mean 'grpo'"):
        ExperienceSettings(estimator="grp0")
    with pytest.raises(ConfigError, match="advantage 'rloo' has no setting 'temperature'"):
        ExperienceSettings(estimator={"name": "rloo", "temperature": 2})
    with pytest.raises(PluginError, match="no aggregation named 'token-men'. Did you mean 'token-mean'"):
        UpdateSettings(aggregation="token-men")
    with pytest.raises(PluginError, match="no policy_backend named 'transfomers'. Did you mean 'transformers'"):
        GRPO(model="nowhere", backend="transfomers")
    with pytest.raises(ConfigError, match="training_metrics 'pass_at_k' has no setting 'treshold'"):
        GRPO(model="nowhere", extra_metrics=[{"name": "pass_at_k", "treshold": 1.0}])


def test_lora_on_the_output_layer_trains_it(tiny_policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names the output layer, whose weights this model shares"):
        add_lora(tiny_policy.model, LoraSettings(target_modules=["lm_head"]))
    config = AutoModelForCausalLM.from_pretrained(tiny_policy.model.name_or_path).config
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config), tiny_policy.tokenizer)
    add_lora(policy.model, LoraSettings(target_modules=["lm_head"], rank=4))
    rows = make_rows(policy, 8)
    before = policy.score(rows)
    updater = Updater(policy, UpdateSettings(lr=0.1))
    for _ in range(2):
        assert updater.update(rows)["grad_norm"] > 0
    assert policy.score(rows) != before
    policy.save(tmp_path)
    assert load_policy(tmp_path).score(rows)[0] == pytest.approx(policy.score(rows)[0], abs=1e-4)


def test_weight_decay_does_not_apply_to_norms_and_biases(tiny_policy: Policy) -> None:
    with torch.no_grad():
        for parameter in tiny_policy.model.parameters():
            parameter.fill_(1.0)
    # Without an advantage there is no gradient, so that only the decay changes weights.
    Updater(tiny_policy, UpdateSettings(lr=0.1, weight_decay=0.5)).update([TrainingRow([1], [2], [0.0], 0.0)])
    values = {name: set(value.flatten().tolist()) for name, value in tiny_policy.model.named_parameters()}
    norms = {name for name in values if name.endswith(".bias") or "norm" in name}
    assert len(norms) > 4
    assert {name for name, found in values.items() if found == {1.0}} == norms
    assert all(value == pytest.approx(0.95) for name in values.keys() - norms for value in values[name])


def test_an_update_without_rows_reports_no_means(tiny_policy: Policy) -> None:
    before = weights(tiny_policy)
    metrics = Updater(tiny_policy, UpdateSettings(minibatches=2)).update([])
    assert metrics.pop("seconds") >= 0
    assert metrics == {"optimizer_steps": 0, "skipped_steps": 0, "lr": 1e-6, "rows": 0, "response_tokens": 0}
    assert all(torch.equal(before[name], value) for name, value in weights(tiny_policy).items())


def test_lora_target_modules_without_a_layer_are_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ConfigError, match="target_modules = 'nonsense'"):
        add_lora(tiny_policy.model, LoraSettings(target_modules="nonsense"))


def test_training_raises_the_probability_of_rewarded_responses(tiny_policy: Policy) -> None:
    good, bad = [10, 11, 258], [20, 21, 258]
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-2))

    def score() -> list[float]:
        rows = [TrainingRow([1, 2, 3], response, [0.0] * 3, 0.0) for response in (good, bad)]
        return [sum(values) for values in tiny_policy.score(rows)]

    before = score()
    for _ in range(5):
        logprobs = tiny_policy.score([TrainingRow([1, 2, 3], response, [], 0.0) for response in (good, bad)])
        updater.update([TrainingRow([1, 2, 3], good, logprobs[0], 1.0), TrainingRow([1, 2, 3], bad, logprobs[1], -1.0)])
    assert score()[0] > before[0] + 1
    assert score()[1] < before[1] - 1


def test_two_updates_a_checkpoint_and_two_more_equal_four_updates_bit_by_bit(tiny_model: Path, tmp_path: Path) -> None:
    options = UpdateSettings(
        lr=1e-2, minibatches=2, epochs=2, schedule="cosine", total_updates=4, warmup_updates=1, seed=3
    )
    batches = [make_rows(load_policy(tiny_model), 8, seed) for seed in range(4)]
    straight = Updater(load_policy(tiny_model), options)
    expected = [straight.update(batch) for batch in batches]

    first = Updater(load_policy(tiny_model), options)
    for batch in batches[:2]:
        first.update(batch)
    first.save(tmp_path / "step-2")
    drawn = (
        random.random(),
        numpy.random.rand(),
        torch.rand(1).item(),
    )  # the state of the global generators is under test

    resumed = Updater(load_policy(tiny_model), options)
    resumed.load(tmp_path / "step-2")
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == drawn  # as above
    assert resumed.updates == 2
    cost = {"seconds", "tokens_per_s"}
    for batch, metrics in zip(batches[2:], expected[2:], strict=True):
        again = resumed.update(batch)
        assert {k: v for k, v in again.items() if k not in cost} == {k: v for k, v in metrics.items() if k not in cost}
    for name, value in weights(straight.policy).items():
        assert torch.equal(value, resumed.policy.model.state_dict()[name]), name


def test_a_checkpoint_is_an_ordinary_model_and_is_replaced_as_a_whole(tiny_policy: Policy, tmp_path: Path) -> None:
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-2))
    updater.save(tmp_path / "last")
    updater.update(make_rows(tiny_policy, 4))
    updater.save(tmp_path / "last")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    for name, value in weights(tiny_policy).items():
        assert torch.equal(model.state_dict()[name], value), name
    assert list(tmp_path.iterdir()) == [tmp_path / "last"]


def test_a_save_that_fails_leaves_the_last_checkpoint(
    tiny_policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = Updater(tiny_policy)
    updater.update(make_rows(tiny_policy, 2))
    updater.save(tmp_path / "last")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    updater.update(make_rows(tiny_policy, 2))
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        updater.save(tmp_path / "last")
    updater.load(tmp_path / "last")
    assert updater.updates == 1


def test_loading_without_a_checkpoint_is_an_error(tiny_policy: Policy, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"updater.pt is missing"):
        Updater(tiny_policy).load(tiny_model)


def test_a_minibatch_that_is_not_finite_is_skipped_and_reported(
    tiny_policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(tiny_policy)
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-2))
    poisoned = [*make_rows(tiny_policy, 3), TrainingRow([1], [2], [math.nan], 1.0)]
    with caplog.at_level(logging.WARNING):
        metrics = updater.update(poisoned)
    assert (metrics["skipped_steps"], metrics["optimizer_steps"]) == (1, 0)
    assert "a minibatch of 4 rows was skipped, its loss is nan" in caplog.text
    for name, value in weights(tiny_policy).items():
        assert torch.equal(value, before[name]), name
    metrics = Updater(tiny_policy, UpdateSettings(lr=1e-2, minibatches=4)).update(poisoned)
    assert (metrics["skipped_steps"], metrics["optimizer_steps"]) == (1, 3)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(value).all() for value in weights(tiny_policy).values())


def test_the_number_of_optimizer_steps_does_not_grow_with_the_number_of_rows(tiny_policy: Policy) -> None:
    updater = Updater(tiny_policy, UpdateSettings(minibatches=3, epochs=2))
    assert [updater.update(make_rows(tiny_policy, n))["optimizer_steps"] for n in (3, 7, 20)] == [6, 6, 6]
    assert updater.update(make_rows(tiny_policy, 2))["optimizer_steps"] == 4
    before = weights(tiny_policy)
    assert updater.update([])["optimizer_steps"] == 0
    assert updater.updates == 5
    assert all(torch.equal(value, before[name]) for name, value in weights(tiny_policy).items())


def test_gradients_are_scaled_down_to_max_grad_norm(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 4)
    updater = Updater(tiny_policy, UpdateSettings(max_grad_norm=1e-3))
    norms: list[float] = []

    def measure(optimizer: torch.optim.Optimizer, *_: object) -> None:
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in optimizer.param_groups[0]["params"])))

    updater._optimizer.register_step_pre_hook(measure)
    assert updater.update(rows)["grad_norm"] > 1e-2
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


def test_the_gap_between_sampler_and_trainer_is_measured_before_the_weights_move(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 8)
    exact = [replace(row, logprobs=score) for row, score in zip(rows, tiny_policy.score(rows), strict=True)]
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-2, minibatches=4))
    assert updater.update(exact)["logprob_gap_max"] < 1e-5
    off = [replace(row, logprobs=[v + 0.5 for v in row.logprobs]) for row in exact]
    assert updater.update(off)["logprob_gap_max"] > 0.3


def test_with_old_logprobs_of_the_trainer_the_first_ratio_is_one(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 6)
    wrong = [*rows[:5], replace(rows[5], logprobs=[v - 3.0 for v in rows[5].logprobs])]
    metrics = Updater(tiny_policy, UpdateSettings(old_logprobs="trainer")).update(wrong)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    assert metrics["logprob_gap_max"] > 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_updates": 2}, [0.5, 1, 1, 1, 1]),
        ({"schedule": "linear", "total_updates": 5, "final_lr_fraction": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine", "total_updates": 3, "final_lr_fraction": 0}, [1, 0.5, 0, 0, 0]),
        ({"schedule": "linear", "total_updates": 4, "warmup_updates": 2, "final_lr_fraction": 0}, [0.5, 1, 1, 0, 0]),
    ],
)
def test_the_learning_rate_follows_its_schedule(options: dict[str, Any], expected: list[float]) -> None:
    plan = UpdateSettings(lr=2.0, **options)
    assert [plan.lr_at(k) / 2.0 for k in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr = 0.0; it must be above 0"),
        ({"clip_low": -0.1}, "clip_low = -0.1: at least 0 is needed"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0; it must be above 1"),
        ({"minibatches": 0}, "minibatches = 0"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "horizon = None"),
        ({"importance_weights": "token"}, "importance_weights = 'token' compares sampler and trainer"),
        ({"objective": "gspo"}, "the paper uses 3e-4"),
        ({"old_logprobs": "trainer", "trust_mask": "token", "trust_lower": 3.0}, "trust_lower = 3.0, trust_upper = 2"),
    ],
)
def test_invalid_update_settings_are_refused_with_their_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateSettings(**options)


def test_a_schedule_without_total_updates_is_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ConfigError, match="schedule = 'linear' needs total_updates"):
        Updater(tiny_policy, UpdateSettings(schedule="linear"))


def test_settings_from_a_file_are_checked_by_key_and_value() -> None:
    def read(**given: Any) -> dict[str, Any]:
        return bind_settings(Owner, {"update": given}, "owner")

    class Owner:
        def __init__(self, update: UpdateSettings) -> None: ...

    assert read(lr=1e-3, betas=[0.9, 0.99])["update"] == UpdateSettings(lr=1e-3, betas=(0.9, 0.99))
    with pytest.raises(ConfigError, match="has no key 'learning_rate'"):
        read(learning_rate=1e-3)
    with pytest.raises(ConfigError, match="lr = -1.0; it must be above 0"):
        read(lr=-1.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TrainingRow([], [1], [0.0], 1.0), "row 0 has 0 prompt"),
        (TrainingRow([1], [], [], 1.0), "0 response tokens"),
        (TrainingRow([1], [1, 2], [0.0], 1.0), "2 response tokens but 1 log-probabilities"),
        (TrainingRow([1] * 512, [1], [0.0], 1.0), "513 tokens; the model has 512 positions"),
        (TrainingRow([1], [1], [0.0], math.nan), "advantage nan"),
        (TrainingRow([1], [1], [0.0], 1.0, weight=-1.0), "weight -1.0"),
        (TrainingRow([1], [1, 2], [0.0, 0.0], 1.0, mask=[1]), "2 response tokens but 1 mask entries"),
        (TrainingRow([1], [1, 2], [0.0, 0.0], 1.0, mask=[0, 0]), "a mask without a sampled token"),
        (TrainingRow([1], [1, 2], [0.0, 0.0], [1.0]), "2 response tokens but 1 advantages"),
    ],
)
def test_an_invalid_row_is_refused_with_its_index_and_reason(
    tiny_policy: Policy, row: TrainingRow, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Updater(tiny_policy).update([row])


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_lora_of_a_mixture_of_experts_is_trained_published_and_exported(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    experts = {"Mixtral": {"num_local_experts": 4}, "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16}}[name]
    tokenizer = load_policy(tiny_model).tokenizer
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts_per_tok=2, initializer_range=0.2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **experts,
    )  # fmt: skip
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(str(tmp_path / "base"))
    policy = load_policy(tmp_path / "base")
    policy.model.config._name_or_path = str(tmp_path / "base")
    add_lora(policy.model, LoraSettings(rank=2))
    updater = Updater(policy, UpdateSettings(lr=0.02))
    updater.update(make_rows(load_policy(tmp_path / "base"), 4))
    ids = torch.tensor([[1, 2, 3, 4]])
    expected = policy.model(ids).logits
    served = load_policy(tmp_path / "base")
    assert not torch.allclose(served.model(ids).logits, expected, atol=1e-2)
    policy.save(tmp_path / "merged")
    served.load_weights(tmp_path / "merged")  # as the policy server does
    torch.testing.assert_close(served.model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    updater.save(tmp_path / "run" / "checkpoint")
    export_model(tmp_path / "run", tmp_path / "whole", merge=True)
    torch.testing.assert_close(load_policy(tmp_path / "whole").model(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda new, old, advantage, mask, settings: new.no_such_method(), "'Tensor' object has no attribute 'no_such"),
        (lambda new, old, advantage, mask, settings: Surrogate(*[new.sum()] * 4), "it returned {'loss_BT': ()"),
        (lambda new, old, advantage, mask, settings: Surrogate(*[new.log()] * 4), "its loss is nan"),
        (lambda new, old, advantage, mask, settings: Surrogate(*[new.detach()] * 4), "does not require grad"),
    ],
    ids=["raises", "shape", "nan", "gradient"],
)
def test_the_error_of_a_custom_loss_names_it_before_the_first_rollout(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch, loss: Any, reason: str
) -> None:
    manager, target = get_manager(), f"{__name__}:planted_loss"
    monkeypatch.setattr(sys.modules[__name__], "planted_loss", loss, raising=False)
    plugin = SimpleNamespace(components=hookimpl(lambda: [Component("policy_loss", "mine", target, summary="x")]))
    manager.register(plugin, "test-mine")
    try:
        with pytest.raises(ConfigError, match=re.escape("objective = 'mine': this policy_loss")) as caught:
            Updater(tiny_policy, UpdateSettings(objective="mine"))
        assert reason in str(caught.value)
    finally:
        manager._pluggy.unregister(plugin)
        del manager.plugins["test-mine"], manager._offers["policy_loss", "mine"]


def test_a_loss_over_the_whole_batch_has_the_same_gradient_however_the_batch_is_split(tiny_policy: Policy) -> None:
    page = (Path(__file__).parents[3] / "docs" / "plugins" / "training.md").read_text(encoding="utf-8")
    code = next(block for block in page.split("```")[1::2] if "def begin" in block).removeprefix("python")
    names: dict[str, Any] = {"torch": torch, "Surrogate": Surrogate}
    exec(code, names)
    batches: list[LossBatch] = []

    base: Any = names["Scaled"]

    class Loss(base):
        def begin(self, batch: LossBatch, settings: UpdateSettings) -> None:
            batches.append(batch)
            super().begin(batch, settings)

    rows = masked(make_rows(tiny_policy, 6))
    found = []
    for limit in (8192, 40):
        updater = Updater(tiny_policy, UpdateSettings(max_tokens_per_microbatch=limit))
        updater.forward_backward(rows, Loss())
        found.append([p.grad.clone() for p in tiny_policy.model.parameters() if p.grad is not None])
        tiny_policy.model.zero_grad()
    assert_same_gradients(*found)
    whole = batches[1]
    assert len(batches) == 2, "the first pass precedes all parts of a batch"
    counts = [row.n_sampled for row in rows]
    assert whole.row_N.bincount().tolist() == counts
    scores = [value for row in rows for value in row.sampled(tiny_policy.score([row])[0])]
    assert whole.logprob_N.tolist() == pytest.approx(scores, abs=1e-5)
    assert whole.old_logprob_N.tolist() == pytest.approx([v for row in rows for v in row.sampled(row.logprobs)])
    assert whole.advantage_N.tolist() == pytest.approx([value for row in rows for value in row.advantages])
    assert (whole.update, whole.stage) == (0, "train")


def test_a_loss_over_the_whole_batch_is_tried_with_made_rows(
    tiny_policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def begin(self, batch: LossBatch, settings: UpdateSettings) -> None:
            assert batch.stage == "check"
            raise KeyError("statistics")

        __call__ = ppo

    manager = get_manager()
    monkeypatch.setattr(sys.modules[__name__], "planted_loss", Wrong, raising=False)
    target = f"{__name__}:planted_loss"
    plugin = SimpleNamespace(components=hookimpl(lambda: [Component("policy_loss", "wrong", target, summary="x")]))
    manager.register(plugin, "test-wrong")
    try:
        with pytest.raises(ConfigError, match=r"objective = 'wrong': this policy_loss .* KeyError: 'statistics'"):
            Updater(tiny_policy, UpdateSettings(objective="wrong"))
    finally:
        manager._pluggy.unregister(plugin)
        del manager.plugins["test-wrong"], manager._offers["policy_loss", "wrong"]


def test_the_error_of_a_loss_in_an_update_names_it(tiny_policy: Policy) -> None:
    def mine(*_: Any) -> Surrogate:
        raise ZeroDivisionError

    with pytest.raises(ConfigError, match=r"the policy_loss <function .*mine .* failed: ZeroDivisionError"):
        Updater(tiny_policy).forward_backward(make_rows(tiny_policy, 1), mine)


def test_settings_that_cannot_be_are_refused_in_python_as_in_a_file(tiny_model: Path) -> None:
    for wrong, message in (
        ({"entropy_coefficient": "cosine"}, "update: entropy_coefficient = 'cosine': Input should be a valid number"),
    ):
        with pytest.raises(ConfigError, match=message):
            UpdateSettings(**wrong)
    for wrong_part, message in (
        (lambda: GRPO(model=str(tiny_model), steps="ten"), "grpo: steps = 'ten': Input should be a valid integer"),
        (lambda: GRPO(model=str(tiny_model), rollouts_per_task=2.5), "grpo: rollouts_per_task = 2.5"),
        (lambda: GRPO(model=str(tiny_model), update={"lrr": 1.0}), "grpo: update has no key 'lrr'"),
        (lambda: ExperienceSettings(failed_reward="none"), "experience: failed_reward = 'none'"),
        (lambda: LoraSettings(rank="big"), "lora: rank = 'big'"),
        (lambda: CheckpointSettings(every="5m"), "checkpoints: every = '5m'"),
        (lambda: SFT(model=str(tiny_model), source="a.jsonl", schedule="cosin"), "sft: schedule = 'cosin'"),
        (lambda: DPO(model=str(tiny_model), source="a.jsonl", batch_size="all"), "dpo: batch_size = 'all'"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrong_part()
    made: Any = {"lr": "1e-3"}
    assert GRPO(model=str(tiny_model), update=made).update.lr == 1e-3, "as in a file"


def test_a_run_shorter_than_its_warm_up_begins_like_the_whole_run_and_says_so(
    tiny_policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    given = UpdateSettings(lr=1e-3, warmup_updates=8, total_updates=2)
    assert [given.lr_at(update) for update in range(2)] == pytest.approx([1e-3 / 8, 2e-3 / 8])
    Updater(tiny_policy, given)
    assert "warmup_updates = 8: the training has 2 updates, so the learning rate ends at 0.00025" in caplog.text
