"""The rules of a trial: how risk and margin are spent, when an offline check rejects, and the tests that decide."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from agentlightning_algorithms.live.settings import LiveSettings
from agentlightning_algorithms.shared.live_resources import KEY_HASH, LiveState, Result
from agentlightning_plugins.shared.statistics.interval import paired_p_value

Verdict: TypeAlias = Literal["better", "not worse", "worse"]

_BETS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Stakes per unit of information, one for each betting strategy; the wealth is the mean over the strategies."""
_MAX_LOSS: Final = 0.9
"""Largest share of the wealth that one block can lose."""
_MIN_BLOCK: Final = 8
_RECENT: Final = 20
"""Number of blocks whose difference an alarm reports."""


class Wealth:
    """Evidence against the hypothesis that a mean difference is at most ``bound``: an e-process.

    The wealth of a gambler who starts with 1 and bets that differences are above the bound. If they are not, it reaches
    1 / risk with a probability of at most ``risk``, however often it is looked at (Ville's inequality). Betting on the
    differences of two samples: Shekhar and Ramdas, Nonparametric two-sample testing by betting, arXiv:2112.09162,
    section 3; the mean over fixed bets: Waudby-Smith and Ramdas, arXiv:2010.09686, section 4.
    """

    def __init__(self, bound: float, *, gains_gamblers: bool = False) -> None:
        """Begins with one gambler; with ``gains_gamblers``, begins with none, and each difference brings one."""
        self._bound = bound
        self._max_bet = _MAX_LOSS / max(1 + bound, 1e-9)
        self._gains_gamblers = gains_gamblers
        self._logs = [-math.inf if gains_gamblers else 0.0] * len(_BETS)

    def add(self, information: float, difference: float) -> None:
        """Bets on a difference, from -1 to 1, in proportion to its information."""
        gain = difference - self._bound
        for number, bet in enumerate(_BETS):
            if self._gains_gamblers:
                log = self._logs[number]
                self._logs[number] = max(log, 0.0) + math.log1p(math.exp(-abs(log)))
            self._logs[number] += math.log1p(min(bet * information, self._max_bet) * gain)

    def refutes(self, risk: float) -> bool:
        """Whether the hypothesis is rejected at this level."""
        top = max(self._logs)
        if top == -math.inf:
            return False
        log_wealth = top + math.log(math.fsum(math.exp(log - top) for log in self._logs) / len(self._logs))
        return log_wealth >= -math.log(risk)


class Blocks:
    """Collects rewards of two versions in blocks of units that were assigned to a version at random."""

    def __init__(self, reward_range: tuple[float, float], share: float) -> None:
        self._low, self._high = reward_range
        self.size = max(_MIN_BLOCK, round(1 / min(share, 1 - share)))
        """Units of a block."""
        self._open: dict[str, tuple[bool, list[float]]] = {}
        self._seen: set[str] = set()

    def add(self, reward: float, *, is_treatment: bool, unit: str) -> tuple[float, float] | None:
        """Adds a reward; returns information and difference of a block that it ends, if both versions are in it.

        Rewards outside the range are clipped. The difference of the mean rewards, treatment minus control, is a share
        of the range.
        """
        if unit in self._seen and unit not in self._open:
            return None
        self._seen.add(unit)
        scaled = (min(max(reward, self._low), self._high) - self._low) / (self._high - self._low)
        self._open.setdefault(unit, (is_treatment, []))[1].append(scaled)
        if len(self._open) < self.size:
            return None
        means = [(treated, statistics.fmean(rewards)) for treated, rewards in self._open.values()]
        treated, control = ([mean for is_treated, mean in means if is_treated is side] for side in (True, False))
        self._open = {}
        if not treated or not control:
            return None
        return len(treated) * len(control) / len(means), statistics.fmean(treated) - statistics.fmean(control)


class SequentialTest:
    """Decides whether a treatment is worse than a control, or better, as soon as the rewards allow it.

    The unit of the analysis is what was assigned to a version at random: a user, or a rollout. Units are taken in
    blocks of about 1 / share, in the order of their first rewards. Given how many units of a block were treated, every
    subset of that size is equally likely, so the difference of means within a block estimates the effect without bias,
    whatever rewards do from block to block. The order must not depend on version and reward together, as the order of
    arrival may; otherwise the good units of a version fill the first blocks. Each block is a bet for two hypotheses,
    "not worse" and "worse by at least ``margin``". Only a block that contains both versions is a bet. A block ends with
    the first reward of its last unit; later rewards of its units are shown but not tested, because they are not
    independent of the earlier ones.
    """

    def __init__(
        self, *, risk: float, margin: float, reward_range: tuple[float, float], share: float, promotion_risk: float = 0
    ) -> None:
        """Begins a test.

        Args:
            risk: probability of calling a treatment worse that is not.
            margin: how much lower the treatment may be and still count as not worse.
            reward_range: rewards outside of it are clipped.
            share: share of the units that are treated.
            promotion_risk: probability of calling a treatment not worse that is worse by ``margin`` or more, and of
                calling one better that is not; 0 means the same as ``risk``.
        """
        self._low, self._high = reward_range
        self._risks = risk, promotion_risk or risk
        self._units = Blocks(reward_range, share)
        self._blocks: list[tuple[float, float]] = []
        """Information and difference of each block; rewards are scaled to [0, 1]."""
        self._worse, self._better = Wealth(0.0), Wealth(0.0)
        self._not_worse = Wealth(-margin / (self._high - self._low))
        self.n_control = self.n_treatment = 0
        """Number of rewards of each version."""

    def add(self, reward: float, *, is_treatment: bool, unit: str) -> None:
        """Adds a reward of a unit."""
        self.n_treatment += is_treatment
        self.n_control += not is_treatment
        block = self._units.add(reward, is_treatment=is_treatment, unit=unit)
        if block is not None:
            information, difference = block
            self._blocks.append(block)
            self._worse.add(information, -difference)
            self._better.add(information, difference)
            self._not_worse.add(information, difference)

    @property
    def difference(self) -> float:
        """Mean difference within blocks, weighted by their information, in units of reward; 0 before the first."""
        return mean_difference(self._blocks) * (self._high - self._low)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the mean difference, in units of reward.

        The lower one holds at all times with probability 1 - ``promotion_risk``, the upper one with 1 - ``risk``. They
        are the differences that the bets do not refute, so interval and verdict agree.
        """
        scale = self._high - self._low
        return (
            scale * _find_bound(lambda bound: self._refutes(bound, 1, self._risks[1])),
            -scale * _find_bound(lambda bound: self._refutes(bound, -1, self._risks[0])),
        )

    def _refutes(self, bound: float, sign: int, risk: float) -> bool:
        wealth = Wealth(bound)
        for information, difference in self._blocks:
            wealth.add(information, sign * difference)
        return wealth.refutes(risk)

    @property
    def verdict(self) -> Verdict | None:
        """The decision; None while the test is undecided."""
        rollback_risk, promotion_risk = self._risks
        if self._worse.refutes(rollback_risk):
            return "worse"
        if self._better.refutes(promotion_risk):
            return "better"
        return "not worse" if self._not_worse.refutes(promotion_risk) else None


class Watch:
    """Raises an alarm once a promoted version is worse than the version before it, at whatever time that begins.

    It adds the wealth of gamblers who begin one after another, as Shiryaev and Roberts do with likelihood ratios, so
    that a difference that begins late is found as soon as an early one. The mean number of blocks until a false alarm
    is at least the wealth that raises it: Shin, Ramdas and Rinaldo, E-detectors, arXiv:2203.03532, section 2.
    """

    def __init__(self, *, interval: int, tolerance: float, reward_range: tuple[float, float], share: float) -> None:
        """Begins to watch.

        Args:
            interval: smallest mean number of rewards until a false alarm.
            tolerance: how much lower the promoted version may be, in units of reward.
            reward_range: rewards outside of it are clipped.
            share: share of the traffic that the version before it keeps.
        """
        self._scale = reward_range[1] - reward_range[0]
        self._units = Blocks(reward_range, share)
        self._worse = Wealth(tolerance / self._scale, gains_gamblers=True)
        self._risk = min(self._units.size / interval, 1.0)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self.n_promoted = self.n_former = 0
        """Number of rewards of each version."""

    def add(self, reward: float, *, is_promoted: bool, unit: str) -> None:
        """Adds a reward of a unit, in the order of arrival."""
        self.n_promoted += is_promoted
        self.n_former += not is_promoted
        block = self._units.add(reward, is_treatment=is_promoted, unit=unit)
        if block is not None and not self.is_alarming:
            self._recent.append(block)
            self._worse.add(block[0], -block[1])

    @property
    def is_alarming(self) -> bool:
        """Whether the promoted version is worse; once it is, this stays so."""
        return self._worse.refutes(self._risk)

    @property
    def difference(self) -> float:
        """Mean difference of the last blocks, in units of reward."""
        return mean_difference(self._recent) * self._scale


def mean_difference(blocks: Collection[tuple[float, float]]) -> float:
    """The mean of the blocks' differences, weighted by their information; 0 without blocks."""
    information, differences = zip(*blocks, strict=True) if blocks else ((), ())
    return statistics.fmean(differences, information) if differences else 0.0


def _find_bound(is_refuted: Callable[[float], bool]) -> float:
    """The largest refuted bound from -1 to 1: a bound is refuted if a larger one is."""
    low, high = -1.0, 1.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


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
        """Adds results, in the order of their arrival."""
        for result in results:
            if self._by_arrival.verdict != "worse":
                _add(self._by_arrival, result)
            heapq.heappush(self._waiting, (result.rollout.start_time, result.rollout.rollout_id, result))
        while self._waiting and self._waiting[0][0] < horizon and not self._is_over():
            _add(self._by_start, heapq.heappop(self._waiting)[2])

    def _is_over(self) -> bool:
        return self.verdict is not None or self._by_start.n_treatment >= self._max_treated

    @property
    def verdict(self) -> Verdict | None:
        """The decision; None while the trial is undecided."""
        if self._by_arrival.verdict == "worse":
            return "worse"
        return None if self._by_start.verdict == "worse" else self._by_start.verdict

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

    The risks of promotion in trials 1, 2, 3, ... are 1/2, 1/6, 1/12, ... of the setting and add up to it: they bound
    the probability of a wrong promotion over the run (alpha-spending; Foster and Stine, JRSS B 70(2), 2008, section 2).
    """
    number = max(state.served_trials, 1)
    return SequentialTest(
        risk=settings.risk * (1 - CHECK_SHARE if settings.check_tasks else 1),
        promotion_risk=settings.risk / (number * (number + 1)),
        margin=next_margin(settings, state),
        reward_range=settings.reward_range,
        share=state.share,
    )


def make_watch(settings: LiveSettings, state: LiveState) -> Watch:
    """The watch over the version that was promoted last."""
    return Watch(
        interval=settings.alarm_interval,
        tolerance=state.tolerance,
        reward_range=settings.reward_range,
        share=state.control_share,
    )


def next_margin(settings: LiveSettings, state: LiveState) -> float:
    """The margin of the next promotion: half of what is left, so that all together stay within the setting."""
    return max(settings.margin - state.margin_spent, 0.0) / 2


def describe_missing(test: SequentialTest, unrated: Mapping[str, int]) -> str:
    """Says how many rewards did not arrive, and whether the two groups differ in that (two-proportion z-test, 1 %)."""
    missing = unrated.get("treatment", 0), unrated.get("control", 0)
    totals = missing[0] + test.n_treatment, missing[1] + test.n_control
    if not any(missing) or not all(totals):
        return f", {sum(missing)} without a reward" if any(missing) else ""
    shares = [gone / total for gone, total in zip(missing, totals, strict=True)]
    pooled = sum(missing) / sum(totals)
    error = math.sqrt(pooled * (1 - pooled) * sum(1 / total for total in totals))
    said = f", {shares[0]:.0%} against {shares[1]:.0%} of the rollouts without a reward"
    biased = error > 0 and abs(shares[0] - shares[1]) > 2.576 * error
    return said + (" (they differ, so the difference in rewards may be biased)" if biased else "")
