"""Compares two streams of bounded rewards while they come in, as often as one likes."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["not worse", "worse"]

_MAX_STAKE: Final = 0.5
"""c of the paper, which recommends 1/2 or 3/4."""


class MeanBound:
    """Bounds from one side for the mean of observations in [0, 1], right at all times at once.

    The predictable plug-in empirical-Bernstein confidence sequence of Waudby-Smith and Ramdas, Estimating means of
    bounded random variables by betting, JRSS B 86(1), 2024, arXiv:2010.09686, theorem 2. With probability of at least
    1 - risk the mean is never above ``center + radius``, however often one looks; the same for ``center - radius``.
    """

    def __init__(self, risk: float) -> None:
        self.n = 0
        self.total = 0.0
        self._log = math.log(1 / risk)
        self._squares = 0.25  # of deviations; with the halves in `mean` it makes the first guess that of the paper
        self._stakes = 0.0
        self._won = 0.0
        self._price = 0.0

    def add(self, value: float) -> None:
        """Takes one more observation, from 0 to 1."""
        guess = (0.5 + self.total) / (self.n + 1)
        variance = self._squares / (self.n + 1)
        self.n += 1
        stake = min(math.sqrt(2 * self._log / (variance * self.n * math.log1p(self.n))), _MAX_STAKE)
        self._stakes += stake
        self._won += stake * value
        self._price += (value - guess) ** 2 * (-math.log1p(-stake) - stake)
        self.total += value
        self._squares += (value - (0.5 + self.total) / (self.n + 1)) ** 2

    @property
    def mean(self) -> float:
        """Of what was observed; 1/2 before there was anything."""
        return self.total / self.n if self.n else 0.5

    @property
    def low(self) -> float:
        """Lower bound, at least 0."""
        return max(self._center - self._radius, 0.0) if self.n else 0.0

    @property
    def high(self) -> float:
        """Upper bound, at most 1."""
        return min(self._center + self._radius, 1.0) if self.n else 1.0

    @property
    def _center(self) -> float:
        return self._won / self._stakes

    @property
    def _radius(self) -> float:
        return (self._log + self._price) / self._stakes


class SequentialTest:
    """Whether a treatment is worse than a control, decided as soon as the rewards say so.

    A treatment that is not worse is called worse with a probability of at most ``risk``, and one that is worse by more
    than ``margin`` is called not worse with at most the same, no matter how often one asks. It holds for any rewards
    within the range that come in at random, without a normal distribution or a minimum number.
    """

    def __init__(self, *, risk: float, margin: float, reward_range: tuple[float, float]) -> None:
        """Nothing observed yet.

        Args:
            risk: of each of the two errors, between 0 and 1.
            margin: how much worse still counts as not worse, in units of reward.
            reward_range: the least and the greatest reward there is; what lies outside counts as the nearest.
        """
        self._low, self._high = reward_range
        self._margin = margin
        # Both sides of a difference may be wrong, so each may be with half the risk.
        self.control = MeanBound(risk / 2)
        self.treatment = MeanBound(risk / 2)

    def add(self, reward: float, *, is_treatment: bool) -> None:
        """Takes one more reward."""
        scaled = (min(max(reward, self._low), self._high) - self._low) / (self._high - self._low)
        (self.treatment if is_treatment else self.control).add(scaled)

    @property
    def difference(self) -> float:
        """Mean of the treatment less mean of the control, as observed, in units of reward."""
        return (self.treatment.mean - self.control.mean) * (self._high - self._low)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the true difference; each is right at all times with probability 1 - risk."""
        scale = self._high - self._low
        return (
            (self.treatment.low - self.control.high) * scale,
            (self.treatment.high - self.control.low) * scale,
        )

    @property
    def verdict(self) -> Verdict | None:
        """What is known by now."""
        low, high = self.interval
        if high < 0:
            return "worse"
        return "not worse" if low > -self._margin else None
