from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentlightning.config import bind_settings
from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.loss import Aggregation
from agentlightning_algorithms.grpo.policy import Policy, load_policy
from agentlightning_algorithms.grpo.row import Row
from agentlightning_algorithms.grpo.setting import UpdateSettings
from agentlightning_algorithms.grpo.updater import Updater


def make_rows(policy: Policy, count: int, seed: int = 0) -> list[Row]:
    """Random rows whose log-probabilities are a little off the policy's own, so that ratios differ from 1."""
    rng = random.Random(seed)
    rows = [
        Row(
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


def gradients(policy: Policy, rows: list[Row], **options: Any) -> tuple[list[Tensor], dict[str, float]]:
    """The gradients of one optimizer step over ``rows``; the weights stay as they are."""
    updater = Updater(policy, UpdateSettings(lr=1e-30, max_grad_norm=1e9, **options))
    caught: list[Tensor] = []

    def catch(optimizer: torch.optim.Optimizer, *_: object) -> None:
        caught.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

    updater._optimizer.register_step_pre_hook(catch)
    metrics = updater.update(rows)
    return caught, metrics


def assert_same_gradients(left: list[Tensor], right: list[Tensor]) -> None:
    """Up to the rounding of float32, which sums in another order."""
    assert len(left) == len(right) > 0
    a, b = (torch.cat([gradient.flatten().double() for gradient in gradients]) for gradients in (left, right))
    assert b.norm() > 1e-3
    assert (a - b).norm() <= 1e-5 * b.norm()


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


same_policy = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.integers(1, 7), st.integers(0, 100), st.integers(1, 120), st.sampled_from(get_args(Aggregation)))
@same_policy
def test_micro_batches_do_not_change_the_gradient(
    tiny_policy: Policy, count: int, seed: int, budget: int, aggregation: Aggregation
) -> None:
    rows = make_rows(tiny_policy, count, seed)
    whole, _ = gradients(tiny_policy, rows, aggregation=aggregation)
    cut, _ = gradients(tiny_policy, rows, aggregation=aggregation, max_tokens_per_microbatch=budget)
    assert_same_gradients(cut, whole)


@given(st.integers(0, 100), st.randoms(use_true_random=False))
@same_policy
def test_the_order_of_rows_does_not_change_the_gradient(tiny_policy: Policy, seed: int, order: random.Random) -> None:
    rows = make_rows(tiny_policy, 6, seed)
    shuffled = order.sample(rows, len(rows))
    assert_same_gradients(gradients(tiny_policy, shuffled)[0], gradients(tiny_policy, rows)[0])


@given(st.integers(0, 100), st.integers(1, 60))
@same_policy
def test_padding_does_not_change_the_gradient(tiny_policy: Policy, seed: int, length: int) -> None:
    rows = make_rows(tiny_policy, 4, seed)
    wide = Row([1] * length, [2] * length, [-1.0] * length, advantage=3.0, weight=0.0)
    assert_same_gradients(gradients(tiny_policy, [*rows, wide])[0], gradients(tiny_policy, rows)[0])


def test_a_row_of_weight_two_counts_as_two_rows(tiny_policy: Policy) -> None:
    rows = make_rows(tiny_policy, 4)
    weighted = [replace(rows[0], weight=2.0), *rows[1:]]
    assert_same_gradients(gradients(tiny_policy, weighted)[0], gradients(tiny_policy, [rows[0], *rows])[0])


def test_the_gradient_is_that_of_the_formula(tiny_policy: Policy) -> None:
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


def test_training_raises_the_probability_of_what_was_rewarded(tiny_policy: Policy) -> None:
    good, bad = [10, 11, 258], [20, 21, 258]
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-2))

    def score() -> list[float]:
        rows = [Row([1, 2, 3], response, [0.0] * 3, 0.0) for response in (good, bad)]
        return [sum(values) for values in tiny_policy.score(rows)]

    before = score()
    for _ in range(5):
        logprobs = tiny_policy.score([Row([1, 2, 3], response, [], 0.0) for response in (good, bad)])
        updater.update([Row([1, 2, 3], good, logprobs[0], 1.0), Row([1, 2, 3], bad, logprobs[1], -1.0)])
    assert score()[0] > before[0] + 1
    assert score()[1] < before[1] - 1


def test_two_updates_a_checkpoint_and_two_more_are_four_updates_to_the_bit(tiny_model: Path, tmp_path: Path) -> None:
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
    drawn = (random.random(), numpy.random.rand(), torch.rand(1).item())  # the global one is under test

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


def test_a_checkpoint_is_an_ordinary_model_and_overwritten_in_whole(tiny_policy: Policy, tmp_path: Path) -> None:
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


def test_loading_from_where_no_checkpoint_is_says_so(tiny_policy: Policy, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"updater.pt is missing"):
        Updater(tiny_policy).load(tiny_model)


def test_a_minibatch_that_is_not_finite_is_skipped_and_reported(
    tiny_policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(tiny_policy)
    updater = Updater(tiny_policy, UpdateSettings(lr=1e-2))
    poisoned = [*make_rows(tiny_policy, 3), Row([1], [2], [math.nan], 1.0)]
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


def test_the_number_of_optimizer_steps_does_not_drift_with_the_number_of_rows(tiny_policy: Policy) -> None:
    updater = Updater(tiny_policy, UpdateSettings(minibatches=3, epochs=2))
    assert [updater.update(make_rows(tiny_policy, n))["optimizer_steps"] for n in (3, 7, 20)] == [6, 6, 6]
    assert updater.update(make_rows(tiny_policy, 2))["optimizer_steps"] == 4
    before = weights(tiny_policy)
    assert updater.update([])["optimizer_steps"] == 0
    assert updater.updates == 5
    assert all(torch.equal(value, before[name]) for name, value in weights(tiny_policy).items())


def test_gradients_are_scaled_down_to_the_longest_allowed(tiny_policy: Policy) -> None:
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


def test_old_logprobs_of_the_trainer_make_the_first_ratio_one(tiny_policy: Policy) -> None:
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
        ({"clip_low": -0.1}, "clip_low = -0.1; it must be at least 0"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0; it must be above 1"),
        ({"minibatches": 0}, "minibatches = 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateSettings(**options)


def test_a_schedule_without_an_end_is_refused(tiny_policy: Policy) -> None:
    with pytest.raises(ConfigError, match="schedule = 'linear' needs total_updates"):
        Updater(tiny_policy, UpdateSettings(schedule="linear"))


def test_settings_of_a_file_are_checked_by_key_and_value() -> None:
    def read(**given: Any) -> dict[str, Any]:
        return bind_settings(Owner, {"update": given}, "owner")

    class Owner:
        def __init__(self, update: UpdateSettings) -> None: ...

    assert read(lr=1e-3, betas=[0.9, 0.99])["update"] == UpdateSettings(lr=1e-3, betas=(0.9, 0.99))
    with pytest.raises(ConfigError, match="Unexpected keyword argument"):
        read(learning_rate=1e-3)
    with pytest.raises(ConfigError, match="lr = -1.0; it must be above 0"):
        read(lr=-1.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row([], [1], [0.0], 1.0), "row 0 has 0 prompt"),
        (Row([1], [], [], 1.0), "0 response tokens"),
        (Row([1], [1, 2], [0.0], 1.0), "2 response tokens but 1 log-probabilities"),
        (Row([1] * 512, [1], [0.0], 1.0), "513 tokens; the model has 512 positions"),
        (Row([1], [1], [0.0], math.nan), "advantage nan"),
        (Row([1], [1], [0.0], 1.0, weight=-1.0), "weight -1.0"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_by_name(tiny_policy: Policy, row: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Updater(tiny_policy).update([row])
