"""A sequential test of two streams of bounded rewards, valid however often it is evaluated."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

Verdict: TypeAlias = Literal["not worse", "worse"]

_MAX_WEIGHT: Final = 0.5
"""c of the paper, which recommends 1/2 or 3/4."""


class MeanBound:
    """One-sided confidence bounds for the mean of observations in [0, 1], valid at all times at once.

    The predictable plug-in empirical-Bernstein confidence sequence of Waudby-Smith and Ramdas, Estimating means of
    bounded random variables by betting, JRSS B 86(1), 2024, arXiv:2010.09686, theorem 2. With probability of at least
    1 - risk the mean is never above ``center + radius``, however often that is checked; the same for
    ``center - radius``.
    """

    def __init__(self, risk: float) -> None:
        self.n = 0
        self.total = 0.0
        self._log = math.log(1 / risk)
        self._squares = 0.25  # of deviations; with the halves in `guess` it starts as in the paper
        self._weights = 0.0
        self._weighted = 0.0
        self._variance_cost = 0.0

    def add(self, value: float) -> None:
        """Adds an observation, from 0 to 1."""
        guess = (0.5 + self.total) / (self.n + 1)
        variance = self._squares / (self.n + 1)
        self.n += 1
        weight = min(math.sqrt(2 * self._log / (variance * self.n * math.log1p(self.n))), _MAX_WEIGHT)
        self._weights += weight
        self._weighted += weight * value
        self._variance_cost += (value - guess) ** 2 * (-math.log1p(-weight) - weight)
        self.total += value
        self._squares += (value - (0.5 + self.total) / (self.n + 1)) ** 2

    @property
    def mean(self) -> float:
        """Observed mean; 1/2 before the first observation."""
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
        return self._weighted / self._weights

    @property
    def _radius(self) -> float:
        return (self._log + self._variance_cost) / self._weights


class SequentialTest:
    """Decides whether a treatment is worse than a control, as soon as the rewards allow it.

    A treatment that is not worse is called worse with a probability of at most ``risk``, and one that is worse by more
    than ``margin`` is called not worse with at most the same, however often the verdict is read. No distribution and
    no minimum number of rewards is assumed.
    """

    def __init__(self, *, risk: float, margin: float, reward_range: tuple[float, float]) -> None:
        """Takes the probability of each of the two errors; rewards outside ``reward_range`` are clipped."""
        self._low, self._high = reward_range
        self._margin = margin
        # Both sides of a difference may be wrong, so each gets half the risk.
        self.control = MeanBound(risk / 2)
        self.treatment = MeanBound(risk / 2)

    def add(self, reward: float, *, is_treatment: bool) -> None:
        """Adds a reward."""
        scaled = (min(max(reward, self._low), self._high) - self._low) / (self._high - self._low)
        (self.treatment if is_treatment else self.control).add(scaled)

    @property
    def difference(self) -> float:
        """Mean of the treatment less mean of the control, as observed, in units of reward."""
        return (self.treatment.mean - self.control.mean) * (self._high - self._low)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the true difference; each holds at all times with probability 1 - risk."""
        scale = self._high - self._low
        lower, upper = self.treatment.low - self.control.high, self.treatment.high - self.control.low
        return lower * scale, upper * scale

    @property
    def verdict(self) -> Verdict | None:
        """The decision; None while the test is undecided."""
        low, high = self.interval
        if high < 0:
            return "worse"
        return "not worse" if low > -self._margin else None
