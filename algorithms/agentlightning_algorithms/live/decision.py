"""The rules of live learning: how risk and margin are spent, and when an offline check rejects a candidate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from agentlightning_algorithms.live.sequential import SequentialTest
from agentlightning_algorithms.live_resources import LiveState
from agentlightning_plugins.statistics.significance import paired_p_value

if TYPE_CHECKING:
    from agentlightning_algorithms.live.algorithm import LiveLearning

CHECK_SHARE: Final = 0.5
"""Of the risk of losing a candidate that is not worse, for the offline check; the trial has the rest."""


def is_lower(differences: Sequence[float], tolerance: float, risk: float) -> bool:
    """Whether the mean is lower than tolerated, and significantly below 0 in a one-sided test that flips signs."""
    if not differences or statistics.fmean(differences) >= -tolerance:
        return False
    return paired_p_value(differences) / 2 <= risk


def make_test(settings: LiveLearning, state: LiveState) -> SequentialTest:
    """The test of a trial.

    The risks of promotion in trials 1, 2, 3, ... are 1/2, 1/6, 1/12, ... of the setting and add up to it, so it bounds
    the probability of a wrong promotion over the whole run (Foster and Stine, Alpha-investing, JRSS B 70(2), 2008,
    section 2: alpha-spending).
    """
    number = max(state.served_trials, 1)
    return SequentialTest(
        risk=settings.risk * (1 - CHECK_SHARE if settings.check_tasks else 1),
        promotion_risk=settings.risk / (number * (number + 1)),
        margin=next_margin(settings, state),
        reward_range=settings.reward_range,
        share=state.share,
    )


def next_margin(settings: LiveLearning, state: LiveState) -> float:
    """The margin of the next promotion: half of what is left, so that all together stay within the setting."""
    return max(settings.margin - state.margin_spent, 0.0) / 2


def describe_missing(test: SequentialTest, unrated: Mapping[str, int]) -> str:
    """Says how many rewards did not arrive, and whether the two groups differ in that (two-proportion z-test, 1 %)."""
    missing, arms = [unrated.get(name, 0) for name in ("treatment", "control")], (test.treatment, test.control)
    totals = [gone + arm.n for gone, arm in zip(missing, arms, strict=True)]
    if not any(missing) or not all(totals):
        return f", {sum(missing)} without a reward" if any(missing) else ""
    shares = [gone / total for gone, total in zip(missing, totals, strict=True)]
    pooled = sum(missing) / sum(totals)
    error = math.sqrt(pooled * (1 - pooled) * sum(1 / total for total in totals))
    said = f", {shares[0]:.0%} against {shares[1]:.0%} of the rollouts without a reward"
    biased = error > 0 and abs(shares[0] - shares[1]) > 2.576 * error
    return said + (" (they differ, so the difference in rewards may be biased)" if biased else "")
