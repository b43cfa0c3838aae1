from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentlightning.plugin.registry import get_manager
from agentlightning.testing.advantage import AdvantageConformance
from agentlightning.testing.policy_loss import PolicyLossConformance
from agentlightning_algorithms.shared.advantage import Estimator, Scored, compute_advantages, flat_groups, gdpo
from agentlightning_algorithms.shared.policy.loss import aggregate, find_factors, kl_penalty, ppo
from agentlightning_algorithms.shared.policy.prepared_row import importance_weights, trusted_tokens
from agentlightning_algorithms.shared.policy.settings import (
    Aggregation,
    KlEstimator,
    MaskLevel,
    UpdateSettings,
    WeightLevel,
)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "verl_golden.json").read_text())
VERL = GOLDEN["verl_0.9.1"]
REWARDS, GROUPS = GOLDEN["inputs"]["rewards"], GOLDEN["inputs"]["uid"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def given_tensor(name: str) -> Tensor:
    return torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)


def assert_equal(ours: Tensor, golden: object) -> None:
    torch.testing.assert_close(ours, torch.tensor(golden, dtype=torch.float64), rtol=0, atol=1e-6)


# Advantages


def scored(rewards: list[float], groups: list[str], tokens_R: list[int] | None = None) -> list[Scored]:
    tokens_R = tokens_R or [1] * len(rewards)
    rows = zip(rewards, groups, tokens_R, strict=True)
    return [Scored(reward, group, rollout, tokens=n) for rollout, (reward, group, n) in enumerate(rows)]


def group_advantages(
    rewards: list[float], groups: list[str], estimator: Estimator = "grpo", *, tokens_R: list[int] | None = None
) -> list[float]:
    return compute_advantages(scored(rewards, groups, tokens_R), estimator, std_floor=0.0)


@pytest.mark.parametrize(
    ("estimator", "golden"),
    [
        ("grpo", "grpo_norm_True"),
        ("dr_grpo", "grpo_norm_False"),
        ("rloo", "adv_rloo"),
        ("reinforce_plus_plus_baseline", "adv_reinforce_plus_plus_baseline"),
        ("opo", "adv_opo"),
    ],
)
def test_advantages_agree_with_verl(estimator: Estimator, golden: str) -> None:
    tokens_R = [int(n) for n in given_tensor("mask").sum(-1)]
    advantages = group_advantages(REWARDS, GROUPS, estimator, tokens_R=tokens_R)
    advantage_B = torch.tensor(advantages, dtype=torch.float64)
    assert_equal(advantage_B[:, None] * given_tensor("mask"), VERL[golden])


def test_several_rewards_are_normalised_apart_as_in_verl() -> None:
    rows = zip(scored(REWARDS, GROUPS), REWARDS, GOLDEN["inputs"]["second_rewards"], given_tensor("mask"), strict=True)
    items = [
        item._replace(rewards={"first": first, "second": second}, tokens=int(mask_T.sum()))
        for item, first, second, mask_T in rows
    ]
    advantages = gdpo(items, std_floor=0.0, weights={"first": 1.0, "second": 0.5})
    assert_equal(torch.tensor(advantages, dtype=torch.float64)[:, None] * given_tensor("mask"), VERL["adv_gdpo"])
    with pytest.raises(ValueError, match="no rollout has the reward 'third'; they have: first, second"):
        gdpo(items, weights={"third": 1.0})


def test_a_rollout_without_one_of_several_rewards_counts_with_the_lowest_of_its_group() -> None:
    rewards: list[dict[str, float]] = [{"fast": 1.0}, {"fast": -1.0}, {}, {"fast": 0.0}]
    items = [Scored(0.0, "g", rollout, rewards=named) for rollout, named in enumerate(rewards)]
    best, worst, failed, middle = gdpo(items)
    assert best > middle > worst == failed


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.sampled_from("abc")), min_size=1, max_size=20),
    st.sampled_from(get_args(Estimator)),
    st.randoms(use_true_random=False),
)
def test_an_advantage_depends_on_its_group_and_not_on_the_order_of_rollouts(
    rollouts: list[tuple[float, str]], estimator: Estimator, random: Any
) -> None:
    order = random.sample(range(len(rollouts)), len(rollouts))
    rewards, groups = [r for r, _ in rollouts], [g for _, g in rollouts]
    tokens = [1 + i % 3 for i in range(len(rewards))]
    plain = group_advantages(rewards, groups, estimator, tokens_R=tokens)
    shuffled = group_advantages(
        [rewards[i] for i in order], [groups[i] for i in order], estimator, tokens_R=[tokens[i] for i in order]
    )
    assert shuffled == pytest.approx([plain[i] for i in order], abs=1e-6)
    if estimator == "reinforce_plus_plus_baseline":  # whitens over the whole batch
        return
    alone = [i for i, group in enumerate(groups) if group == "a"]
    assert group_advantages(
        [rewards[i] for i in alone], ["a"] * len(alone), estimator, tokens_R=[tokens[i] for i in alone]
    ) == pytest.approx([plain[i] for i in alone], abs=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.sampled_from(get_args(Estimator)))
def test_advantages_of_a_group_add_up_to_zero(rewards: list[float], estimator: Estimator) -> None:
    assert math.fsum(group_advantages(rewards, ["g"] * len(rewards), estimator)) == pytest.approx(0, abs=1e-6)


def test_rloo_compares_each_call_with_the_mean_of_the_other_rollouts() -> None:
    items = [Scored(1.0, "g", "A"), Scored(0.0, "g", "A"), Scored(0.0, "g", "B")]
    assert compute_advantages(items, "rloo") == pytest.approx([1.0, 0.0, -0.5])


def test_groups_without_spread_are_found() -> None:
    rewards = [0.1, 0.1, 0.1 + 1e-12, 1, 0, 0.7]
    groups = ["flat", "flat", "flat", "spread", "spread", "single"]
    assert flat_groups(scored(rewards, groups)) == {"flat", "single"}
    assert group_advantages([0.1, 0.1, 0.1], ["flat"] * 3) == pytest.approx([0, 0, 0], abs=1e-9)


def test_the_only_rollout_of_a_group_keeps_its_reward_as_in_verl() -> None:
    assert group_advantages([0.7], ["a"], "rloo") == [0.7]
    assert group_advantages([0.7], ["a"], "grpo") == pytest.approx([0.7 / (1 + 1e-6)])


class TestEstimators(AdvantageConformance):
    @pytest.fixture(params=[*get_args(Estimator), "gdpo"])
    def advantage(self, request: pytest.FixtureRequest) -> Any:
        return get_manager().create("advantage", request.param)


# Loss


def test_the_clipped_loss_and_its_gradient_and_metrics_agree_with_verl() -> None:
    logprob_BT = given_tensor("new").requires_grad_()
    mask_BT = given_tensor("mask")
    advantage_B = torch.tensor(group_advantages(REWARDS, GROUPS), dtype=torch.float64)
    # The golden loss was made with clip_ratio_low = 0.2 and clip_ratio_high = 0.28.
    settings = UpdateSettings(clip_low=0.2, clip_high=0.28)
    surrogate = ppo(logprob_BT, given_tensor("old"), advantage_B[:, None], mask_BT, settings)
    loss = aggregate(surrogate.loss_BT, mask_BT)
    loss.backward()
    assert logprob_BT.grad is not None
    assert_equal(loss.detach(), VERL["loss_vanilla"])
    assert_equal(logprob_BT.grad, VERL["grad_vanilla"])
    golden = VERL["metrics_vanilla"]
    assert_equal(aggregate(surrogate.clipped_BT, mask_BT), golden["actor/pg_clipfrac"])
    assert_equal(aggregate(surrogate.dual_clipped_BT, mask_BT), golden["actor/pg_clipfrac_lower"])
    assert_equal(aggregate(-surrogate.log_ratio_BT, mask_BT), golden["actor/ppo_kl"])


@pytest.mark.parametrize(
    ("surrogate", "golden"),
    [
        ("gspo", "gspo"),
        ("cispo", "cispo"),
        ("sapo", "sapo"),
        ("gmpo", "geo_mean"),
        ("cross_entropy", "gpg"),
        ("dppo", "dppo_tv"),
        ({"name": "dppo", "divergence": "kl"}, "dppo_kl"),
    ],
)
def test_other_losses_and_their_gradients_agree_with_verl(surrogate: Any, golden: str) -> None:
    logprob_BT = given_tensor("new").requires_grad_()
    mask_BT = given_tensor("mask")
    advantage_B = torch.tensor(group_advantages(REWARDS, GROUPS), dtype=torch.float64)
    bounds = {"clip_low": 0.02, "clip_high": 0.03} if "dppo" in golden else {"clip_low": 0.2, "clip_high": 0.28}
    loss_of = get_manager().create("policy_loss", surrogate)
    found = loss_of(logprob_BT, given_tensor("old"), advantage_B[:, None], mask_BT, UpdateSettings(**bounds))
    by_token = golden in ("gpg", "dppo_tv", "dppo_kl")
    loss = aggregate(found.loss_BT, mask_BT, "token-mean" if by_token else "seq-mean-token-mean")  # as in verl
    if f"clipfrac_{golden}" in VERL and golden != "geo_mean":  # verl counts tokens that were clipped on one side only
        assert_equal(aggregate(found.clipped_BT, mask_BT), VERL[f"clipfrac_{golden}"])
    loss.backward()
    assert_equal(loss.detach(), VERL[f"loss_{golden}"])
    assert logprob_BT.grad is not None
    assert_equal(logprob_BT.grad, VERL[f"grad_{golden}"])


@pytest.mark.parametrize(
    ("level", "lower", "golden"),
    [("token", None, "is_token_2.0"), ("sequence", None, "is_sequence_2.0"), ("token", 0.5, "is_token_0.5_2.0")],
)
def test_importance_weights_agree_with_verl(level: WeightLevel, lower: float | None, golden: str) -> None:
    log_ratio_BT = given_tensor("old") - given_tensor("rollout")
    settings = UpdateSettings(
        old_logprobs="trainer", importance_weights=level, importance_upper=2.0, importance_lower=lower
    )
    assert_equal(importance_weights(log_ratio_BT, given_tensor("mask"), settings), VERL[golden])


@pytest.mark.parametrize(
    ("level", "lower", "upper", "golden"),
    [
        ("token", 0.5, 2.0, "rs_token_k1_0.5_2.0"),
        ("sequence", 0.5, 2.0, "rs_seq_sum_k1_0.5_2.0"),
        ("sequence-mean", 0.8, 1.25, "rs_seq_mean_k1_0.8_1.25"),
    ],
)
def test_trust_masks_agree_with_verl(level: MaskLevel, lower: float, upper: float, golden: str) -> None:
    log_ratio_BT = given_tensor("old") - given_tensor("rollout")
    settings = UpdateSettings(old_logprobs="trainer", trust_mask=level, trust_lower=lower, trust_upper=upper)
    assert_equal(trusted_tokens(log_ratio_BT, given_tensor("mask"), settings), VERL[golden])


class TestLosses(PolicyLossConformance):
    @pytest.fixture(
        params=["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", {"name": "dppo", "divergence": "kl"}, "cross_entropy"]
    )
    def policy_loss(self, request: pytest.FixtureRequest) -> Any:
        return get_manager().create("policy_loss", request.param)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped", "dual"),
    [
        (1.1, 1.0, -1.1, -1.1, 0, 0),
        (1.5, 1.0, -1.4, 0.0, 1, 0),  # held at 1 + clip_high
        (0.5, 1.0, -0.5, -0.5, 0, 0),
        (0.5, -1.0, 0.9, 0.0, 1, 0),  # held at 1 - clip_low
        (2.5, -1.0, 2.5, 2.5, 0, 0),
        (5.0, -1.0, 3.0, 0.0, 0, 1),  # held at dual_clip
    ],
)
def test_the_surrogate_clips_the_ratio_as_in_the_papers(
    ratio: float, advantage: float, loss: float, slope: float, clipped: int, dual: int
) -> None:
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    settings = UpdateSettings(clip_low=0.1, clip_high=0.4)
    surrogate = ppo(logprob, old, torch.tensor([[advantage]]), mask, settings)
    surrogate.loss_BT.sum().backward()
    assert logprob.grad is not None
    assert surrogate.loss_BT.item() == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(slope)
    assert (surrogate.clipped_BT.item(), surrogate.dual_clipped_BT.item()) == (clipped, dual)


def test_without_dual_clip_the_loss_is_unbounded() -> None:
    logprob = torch.tensor([[math.log(5.0)]])
    settings = UpdateSettings(dual_clip=None)
    surrogate = ppo(logprob, torch.zeros(1, 1), torch.tensor([[-1.0]]), torch.ones(1, 1), settings)
    assert surrogate.loss_BT.item() == pytest.approx(5.0)


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_kl_estimates_agree_with_verl(estimator: KlEstimator) -> None:
    assert_equal(kl_penalty(given_tensor("new"), given_tensor("ref"), estimator), VERL[f"kl_{estimator}"])


def test_gradients_of_kl_estimates_agree_with_their_formulas() -> None:
    new_BT, ref_BT = given_tensor("new"), given_tensor("ref")
    slopes = {"k2": new_BT - ref_BT, "k3": 1.0 - (ref_BT - new_BT).exp()}
    for estimator in get_args(KlEstimator):
        logprob_BT = new_BT.clone().requires_grad_()
        kl_penalty(logprob_BT, ref_BT, estimator).sum().backward()
        assert logprob_BT.grad is not None
        assert_equal(logprob_BT.grad, slopes[estimator].tolist())


def test_kl_estimators_in_a_loss_have_the_documented_gradients() -> None:
    free = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-0.5, 0.2, 0.4, -0.9], dtype=torch.float64).log_softmax(0)
    p = free.log_softmax(0)
    forward, backward = (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()
    for estimator, divergence in (("k2", forward), ("k3", backward)):
        found = (p.exp().detach() * kl_penalty(p, q, estimator)).sum()
        gradients = [torch.autograd.grad(each, free, retain_graph=True)[0] for each in (found, divergence)]
        torch.testing.assert_close(*gradients)


def test_k3_averages_to_the_kl_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    divergence = (p * (p.log() - q.log())).sum()
    torch.testing.assert_close((p * kl_penalty(p.log(), q.log(), "k3")).sum(), divergence)


@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if name != "rollout-mean"])
def test_aggregations_agree_with_verl(aggregation: Aggregation) -> None:
    ours = aggregate(given_tensor("new"), given_tensor("mask"), aggregation, horizon=5)
    assert_equal(ours, VERL[f"agg_{aggregation}"])


def test_the_mean_over_rollouts_does_not_depend_on_their_numbers_of_rows() -> None:
    value_BT, mask_BT = random_batch([3, 2, 4])
    lengths_B = torch.tensor([5.0, 5.0, 4.0], dtype=torch.float64)  # the first two rows are one rollout
    ours = aggregate(value_BT, mask_BT, "rollout-mean", rollout_length_B=lengths_B)
    first = torch.cat([value_BT[0, :3], value_BT[1, :2]]).mean()
    torch.testing.assert_close(ours, (first + value_BT[2, :4].mean()) / 2)
    with pytest.raises(ValueError, match="rollout-mean needs rollout_length_B"):
        aggregate(value_BT, mask_BT, "rollout-mean")


lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def random_batch(row_lengths: list[int]) -> tuple[Tensor, Tensor]:
    mask_BT = (torch.arange(5) < torch.tensor(row_lengths)[:, None]).double()
    return torch.randn(mask_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), mask_BT


def rollout_lengths(row_lengths: list[int], copies: list[int] | None = None) -> Tensor:
    """Returns the length of each row's rollout; rows 2k and 2k + 1 belong to one rollout."""
    counted = [n * c for n, c in zip(row_lengths, copies or [1] * len(row_lengths), strict=True)]
    return torch.tensor([sum(counted[i - i % 2 : i - i % 2 + 2]) for i in range(len(counted))]).double()


@given(lengths, st.integers(0, 6), st.sampled_from(AGGREGATIONS))
def test_the_losses_of_the_parts_of_a_batch_add_up_to_the_loss_of_the_batch(
    row_lengths: list[int], cut: int, aggregation: Aggregation
) -> None:
    value_BT, mask_BT = random_batch(row_lengths)
    lengths_B = rollout_lengths(row_lengths)
    whole = find_factors(mask_BT, aggregation, rollout_length_B=lengths_B, horizon=7).divisor
    shares = [
        aggregate(value_BT[part], mask_BT[part], aggregation, normalizer=whole, rollout_length_B=lengths_B[part])
        for part in (slice(cut), slice(cut, None))
    ]
    at_once = aggregate(value_BT, mask_BT, aggregation, rollout_length_B=lengths_B, horizon=7)
    torch.testing.assert_close(sum(shares), at_once)


@given(lengths, st.data(), st.sampled_from(AGGREGATIONS))
def test_a_row_of_weight_n_counts_as_n_copies_of_the_row(
    row_lengths: list[int], data: st.DataObject, aggregation: Aggregation
) -> None:
    value_BT, mask_BT = random_batch(row_lengths)
    size = len(row_lengths)
    copies = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    if not any(n and c for n, c in zip(row_lengths, copies, strict=True)):
        copies = [1] * size
    index = [i for i, count in enumerate(copies) for _ in range(count)]
    lengths_B = rollout_lengths(row_lengths, copies)
    weighted = aggregate(
        value_BT, mask_BT, aggregation, weight_B=torch.tensor(copies).double(), rollout_length_B=lengths_B
    )
    copied = aggregate(value_BT[index], mask_BT[index], aggregation, rollout_length_B=lengths_B[index])
    torch.testing.assert_close(weighted, copied)
