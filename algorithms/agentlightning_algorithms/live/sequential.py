"""A sequential test of two streams of bounded rewards, valid however often it is evaluated and under drift."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["better", "not worse", "worse"]

_BETS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Stakes per unit of information, one for each betting strategy; the wealth is the mean over the strategies."""
_MAX_LOSS: Final = 0.9
"""Largest share of the wealth that one block can lose."""
_MIN_BLOCK: Final = 8


class Wealth:
    """Evidence against the hypothesis that a mean difference is at most ``bound``: an e-process.

    The wealth of a gambler who starts with 1 and bets that differences are above the bound. If they are not, it reaches
    1 / risk with a probability of at most ``risk``, however often it is looked at (Ville's inequality). Betting on the
    differences of two samples: Shekhar and Ramdas, Nonparametric two-sample testing by betting, arXiv:2112.09162,
    section 3; the mean over fixed bets: Waudby-Smith and Ramdas, arXiv:2010.09686, section 4.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._max_bet = _MAX_LOSS / max(1 + bound, 1e-9)
        self._logs = [0.0] * len(_BETS)

    def add(self, information: float, difference: float) -> None:
        """Bets on a difference, from -1 to 1, in proportion to its information."""
        gain = difference - self._bound
        for number, bet in enumerate(_BETS):
            self._logs[number] += math.log1p(min(bet * information, self._max_bet) * gain)

    def refutes(self, risk: float) -> bool:
        """Whether the hypothesis is rejected at this level."""
        top = max(self._logs)
        log_wealth = top + math.log(math.fsum(math.exp(log - top) for log in self._logs) / len(self._logs))
        return log_wealth >= -math.log(risk)


@dataclass
class Arm:
    """Number and sum of one version's rewards."""

    n: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Mean reward; NaN before the first one."""
        return self.total / self.n if self.n else math.nan


class SequentialTest:
    """Decides whether a treatment is worse than a control, or better, as soon as the rewards allow it.

    The unit of the analysis is what was assigned to a version at random: a user, or a rollout. Units are taken in
    blocks of about 1 / share, in the order of their first rewards. Given how many units of a block were treated, every
    subset of that size is equally likely, so the difference of means within a block estimates the effect without bias,
    whatever rewards do from block to block. The order must not depend on version and reward together, as the order of
    arrival may; otherwise the good ones of a version fill the first blocks. Each block is a bet for two hypotheses,
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
            share: of the units that are treated.
            promotion_risk: probability of calling a treatment not worse that is worse by ``margin`` or more, and of
                calling one better that is not; 0 means the same as ``risk``.
        """
        self._low, self._high = reward_range
        self._risks = risk, promotion_risk or risk
        self._size = max(_MIN_BLOCK, round(1 / min(share, 1 - share)))
        self._open: dict[str, tuple[bool, list[float]]] = {}
        self._seen: set[str] = set()
        self._blocks: list[tuple[float, float]] = []
        """Information and difference of each block; rewards are scaled to [0, 1]."""
        self._worse, self._better = Wealth(0.0), Wealth(0.0)
        self._not_worse = Wealth(-margin / (self._high - self._low))
        self.control, self.treatment = Arm(), Arm()

    def add(self, reward: float, *, is_treatment: bool, unit: str) -> None:
        """Adds a reward of a unit."""
        reward = min(max(reward, self._low), self._high)
        arm = self.treatment if is_treatment else self.control
        arm.n += 1
        arm.total += reward
        if unit in self._seen and unit not in self._open:
            return
        self._seen.add(unit)
        self._open.setdefault(unit, (is_treatment, []))[1].append((reward - self._low) / (self._high - self._low))
        if len(self._open) == self._size:
            self._end_block()

    def _end_block(self) -> None:
        means = [(treated, statistics.fmean(rewards)) for treated, rewards in self._open.values()]
        treated, control = ([mean for is_treated, mean in means if is_treated is side] for side in (True, False))
        self._open = {}
        if not treated or not control:
            return
        difference = statistics.fmean(treated) - statistics.fmean(control)
        information = len(treated) * len(control) / len(means)
        self._blocks.append((information, difference))
        self._worse.add(information, -difference)
        self._better.add(information, difference)
        self._not_worse.add(information, difference)

    @property
    def difference(self) -> float:
        """Mean difference within blocks, weighted by their information, in units of reward; 0 before the first."""
        weight = math.fsum(information for information, _ in self._blocks)
        total = math.fsum(information * difference for information, difference in self._blocks)
        return total / weight * (self._high - self._low) if weight else 0.0

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


def _find_bound(is_refuted: Callable[[float], bool]) -> float:
    """The largest refuted bound from -1 to 1: a bound is refuted if a larger one is."""
    low, high = -1.0, 1.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
