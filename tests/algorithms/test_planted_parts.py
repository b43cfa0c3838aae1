"""Parts of a training with a planted mistake, each of which fails the conformance test that is named next to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.testing.advantage import AdvantageConformance
from agentlightning.testing.policy_loss import PolicyLossConformance
from agentlightning_algorithms.shared.advantage import Scored, dr_grpo
from agentlightning_algorithms.shared.policy.loss import Surrogate, ppo
from tests.planted import assert_each_test_finds_one, assert_found


def divides_by_the_deviation(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    centered = dr_grpo(items, std_floor=std_floor)
    spread = {
        item.group: max(abs(v) for i, v in zip(items, centered, strict=True) if i.group == item.group) for item in items
    }
    return [v / spread[item.group] for item, v in zip(items, centered, strict=True)]


def forgets_single_rollouts(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    groups = [item.group for item in items]
    found = dr_grpo(items, std_floor=std_floor)
    return [v for group, v in zip(groups, found, strict=True) if groups.count(group) > 1]


def takes_costs(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    return [-value for value in dr_grpo(items, std_floor=std_floor)]


def counts_on_the_order(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    first: dict[Any, float] = {}
    return [
        item.value - first.setdefault((item.group, item.turn), item.value)
        for item in items
        if math.isfinite(item.value)
    ]


def has_no_baseline(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    dr_grpo(items, std_floor=std_floor)
    return [item.value for item in items]


def accepts_nan(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    return dr_grpo([item._replace(value=min(item.value, 1e9) if item.value == item.value else 0.0) for item in items])


def sorts_the_items(items: list[Scored], *, std_floor: float) -> list[float]:
    items.sort()
    return dr_grpo(items, std_floor=std_floor)


ESTIMATORS = [
    (divides_by_the_deviation, "test_each_item_has_a_finite_advantage", "it raised ZeroDivisionError"),
    (forgets_single_rollouts, "test_each_item_has_a_finite_advantage", "one finite number for each item"),
    (takes_costs, "test_a_better_rollout_of_a_task_has_a_higher_advantage", "the better one has the higher advantage"),
    (counts_on_the_order, "test_the_order_of_items_does_not_matter", "found by Scored.group and Scored.turn"),
    (sorts_the_items, "test_the_order_of_items_does_not_matter", "leaves the items as they are"),
    (has_no_baseline, "test_equal_rollouts_have_no_advantage", "their advantages are 0"),
    (accepts_nan, "test_a_value_that_is_not_finite_is_refused_with_its_rollout", "nan was accepted"),
]


def unbounded(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    ratio = (new - old).exp()
    return ppo(new, old, advantage, mask, settings)._replace(loss_BT=-advantage * ratio)


def ascends(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    found = ppo(new, old, advantage, mask, settings)
    return found._replace(loss_BT=-found.loss_BT)


def averages_padding(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    ratio = (new - old).clamp(-20, 20).mean(-1, keepdim=True).exp().expand_as(new)
    return ppo(new, old, advantage, mask, settings)._replace(loss_BT=-advantage * ratio)


def compares_rows(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    return (
        ppo(new, old, advantage - advantage.mean(), mask, settings)
        if len(new) > 1
        else ppo(new, old, advantage, mask, settings)
    )


def takes_rows_only(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    return ppo(new, old, advantage[:, :1] / advantage.shape[1], mask, settings)


def keeps_the_graph(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    return ppo(new, old, advantage, mask, settings)._replace(log_ratio_BT=new - old)


def reports_the_ratio(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    return ppo(new, old, advantage, mask, settings)._replace(log_ratio_BT=(new - old).exp().detach().clamp(max=1e9))


def returns_the_mean(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    found = ppo(new, old, advantage, mask, settings)
    return found._replace(loss_BT=(found.loss_BT * mask).mean())


def fills_the_mask(new: Any, old: Any, advantage: Any, mask: Any, settings: Any) -> Surrogate:
    return ppo(new, old, advantage, mask.fill_(1.0), settings)


class NeedsMore:
    """A loss whose first pass asks for what the batch lacks."""

    def begin(self, batch: Any, settings: Any) -> None:
        batch.entropy_N.mean()

    __call__ = staticmethod(ppo)


LOSSES = [
    (NeedsMore(), "test_losses_and_gradients_are_finite", "begin(batch, settings) accepts a LossBatch"),
    (unbounded, "test_losses_and_gradients_are_finite", "loss_BT is finite"),
    (returns_the_mean, "test_losses_and_gradients_are_finite", "loss_BT has a value for each token"),
    (fills_the_mask, "test_losses_and_gradients_are_finite", "leaves its arguments unchanged"),
    (ascends, "test_good_tokens_become_more_likely_and_bad_ones_not", "a positive advantage more likely"),
    (averages_padding, "test_tokens_outside_the_mask_have_no_effect", "tokens where mask_BT is 0"),
    (compares_rows, "test_a_row_does_not_depend_on_other_rows", "depends on this row only"),
    (takes_rows_only, "test_an_advantage_may_be_given_for_each_row_or_each_token", "advantage_BT broadcasts"),
    (keeps_the_graph, "test_the_ratio_and_its_clipping_are_reported", "without gradient"),
    (reports_the_ratio, "test_the_ratio_and_its_clipping_are_reported", "log_ratio_BT is"),
]


@pytest.mark.parametrize(("advantage", "test", "message"), ESTIMATORS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_kit_for_estimators_finds_a_planted_mistake(
    advantage: Any, test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(AdvantageConformance, test, request, message, advantage=advantage)


@pytest.mark.parametrize(("policy_loss", "test", "message"), LOSSES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_kit_for_losses_finds_a_planted_mistake(
    policy_loss: Any, test: str, message: str, request: pytest.FixtureRequest
) -> None:
    assert_found(PolicyLossConformance, test, request, message, policy_loss=policy_loss)


def test_every_test_of_the_kits_finds_a_mistake() -> None:
    assert_each_test_finds_one(AdvantageConformance, [test for _, test, _ in ESTIMATORS])
    assert_each_test_finds_one(PolicyLossConformance, [test for _, test, _ in LOSSES])
