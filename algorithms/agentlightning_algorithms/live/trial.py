"""The rules of a trial: how risk and margin are spent, when an offline check rejects, and the tests that decide."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agentlightning_algorithms.live.sequential import SequentialTest, Verdict
from agentlightning_algorithms.live.settings import LiveSettings
from agentlightning_algorithms.shared.live_resources import KEY_HASH, LiveState, Result
from agentlightning_plugins.shared.statistics.significance import paired_p_value

CHECK_SHARE: Final = 0.5
"""Of the risk of losing a candidate that is not worse, for the offline check; the trial has the rest."""


class Trial:
    """Tests the results of a trial in two orders.

    The order in which results arrive can only roll the candidate back, so a candidate whose rollouts fail immediately
    is stopped immediately. The order in which rollouts started can only promote it: a result waits for the results of
    all rollouts that started before, so a candidate gains nothing by failing late.
    """

    def __init__(self, settings: LiveSettings, state: LiveState) -> None:
        """Begins a trial; ``state`` is the state in which it began."""
        self._by_arrival = make_test(settings, state)
        self._by_start = make_test(settings, state)
        self._max_treated = settings.max_treated
        self._waiting: list[tuple[float, str, Result]] = []
        """Heap of the results that the test in the order of start has not received yet."""

    def add(self, results: Iterable[Result], horizon: float) -> None:
        """Adds results, in the order of their arrival.

        Args:
            results: of rollouts whose metadata have the group.
            horizon: Unix time before which each started rollout has a result or will not get one.
        """
        for result in results:
            if self._by_arrival.verdict != "worse":
                _add(self._by_arrival, result)
            heapq.heappush(self._waiting, (result.rollout.start_time, result.rollout.rollout_id, result))
        while self._waiting and self._waiting[0][0] < horizon and not self._is_over():
            _add(self._by_start, heapq.heappop(self._waiting)[2])

    def _is_over(self) -> bool:
        return self.verdict is not None or self._by_start.treatment.n >= self._max_treated

    @property
    def verdict(self) -> Verdict | None:
        """The decision; None while the trial is undecided."""
        if self._by_arrival.verdict == "worse":
            return "worse"
        return None if self._by_start.verdict == "worse" else self._by_start.verdict

    @property
    def is_waiting(self) -> bool:
        """Whether the results that arrived would promote the candidate, while those of earlier rollouts are missing."""
        return bool(self._waiting) and self.verdict is None and self._by_arrival.verdict in ("better", "not worse")

    @property
    def deciding_test(self) -> SequentialTest:
        """The test with the numbers that belong to the verdict."""
        return self._by_arrival if self.verdict == "worse" else self._by_start


def _add(test: SequentialTest, result: Result) -> None:
    metadata = result.rollout.metadata or {}
    unit = metadata.get(KEY_HASH, result.rollout.rollout_id)
    test.add(result.reward, is_treatment=metadata["group"] == "treatment", unit=unit)


def is_lower(differences: Sequence[float], tolerance: float, risk: float) -> bool:
    """Whether the mean is lower than tolerated, and significantly below 0 in a one-sided test that flips signs."""
    if not differences or statistics.fmean(differences) >= -tolerance:
        return False
    return paired_p_value(differences) / 2 <= risk


def make_test(settings: LiveSettings, state: LiveState) -> SequentialTest:
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


def next_margin(settings: LiveSettings, state: LiveState) -> float:
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
