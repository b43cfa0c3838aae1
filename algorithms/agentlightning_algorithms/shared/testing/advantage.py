"""``AdvantageConformance``: the tests that every component of the kind ``advantage`` must pass."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.testing import promised, refusal
from agentlightning_algorithms.shared.advantage import STD_FLOOR, Scored


def score(*groups: Sequence[float], turns: int = 0, tokens: int = 3) -> list[Scored]:
    """Returns a rollout for each value; with ``turns``, a call for each turn of each rollout."""
    items = []
    for group, values in enumerate(groups):
        for rollout, value in enumerate(values):
            for turn in range(turns) or [None]:
                items.append(Scored(value, f"task {group}", f"ro-{group}-{rollout}", turn, tokens + rollout))
    return items


class AdvantageConformance:
    """Tests that every estimator must pass.

    Subclass it and define one fixture, ``advantage``: a function ``(items, *, std_floor)``.
    """

    def compute(self, advantage: Callable[..., Any], items: Sequence[Scored]) -> list[float]:
        """Returns the advantages; fails if there is not one finite number for each item."""
        given = list(items)
        with promised("an estimator takes items of any groups, also ones with one rollout, and the keyword std_floor"):
            found = [float(value) for value in advantage(items, std_floor=STD_FLOOR)]
        promise = "an estimator returns one finite number for each item, in the order of the items"
        assert len(found) == len(items), f"{promise}: {len(found)} for {len(items)} items"
        assert all(map(math.isfinite, found)), f"{promise}: {found} for {[item.value for item in items]}"
        assert list(items) == given, "an estimator leaves the items as they are"
        return found

    def test_each_item_has_a_finite_advantage(self, advantage: Any) -> None:
        for groups in ([], [[1.0]], [[1.0], [0.0, 0.5]], [[1e9, -1e9, 0.0]], [[0.0] * 4, [0.25, 0.5]]):
            for turns in (0, 1, 3):
                self.compute(advantage, score(*groups, turns=turns))
        self.compute(advantage, score([0.0, 1.0], tokens=0))

    def test_a_better_rollout_of_a_task_has_a_higher_advantage(self, advantage: Any) -> None:
        for turns in (0, 2):
            items = score([0.0, 0.5, 1.0], [-2.0, -1.0, -3.0], turns=turns)
            found = self.compute(advantage, items)
            rated = list(zip(items, found, strict=True))
            for (worse, low), (better, high) in itertools.permutations(rated, 2):
                if (worse.group, worse.turn) == (better.group, better.turn) and worse.value < better.value:
                    promise = "of two rollouts of a task, the better one has the higher advantage"
                    assert low < high, f"{promise}: {worse.value} has {low}, {better.value} has {high}"

    def test_the_order_of_items_does_not_matter(self, advantage: Any) -> None:
        items = score([0.0, 0.5, 1.0], [0.75, 0.25], turns=2)
        expected = self.compute(advantage, items)
        found = self.compute(advantage, items[::-1])[::-1]
        assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(expected, found, strict=True)), (
            f"groups are found by Scored.group and Scored.turn, not by position: reversed items have {found}, "
            f"not {expected}"
        )

    def test_equal_rollouts_have_no_advantage(self, advantage: Any) -> None:
        found = self.compute(advantage, score([0.5, 0.5, 0.5], [1.0, 1.0]))
        assert all(abs(value) < 1e-6 for value in found), (
            f"rollouts of a task with equal values teach nothing: their advantages are 0, not {found}"
        )

    def test_a_value_that_is_not_finite_is_refused_with_its_rollout(self, advantage: Any) -> None:
        promise = "an estimator raises a ValueError that names the rollout whose value is not finite"
        for value in (math.nan, math.inf):
            items = score([0.0, value])
            reason = refusal(promise, ValueError, functools.partial(advantage, items, std_floor=STD_FLOOR))
            assert reason is not None, f"{promise}; {value} was accepted"
            assert "ro-0-1" in reason, f"{promise}; it says: {reason}"
