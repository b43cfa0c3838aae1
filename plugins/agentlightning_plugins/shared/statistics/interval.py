"""Confidence intervals of means and of differences between means, at 95 %."""

from __future__ import annotations

import functools
import math
import operator
import random
import statistics
from collections.abc import Sequence
from typing import Final, TypeAlias

Interval: TypeAlias = tuple[float, float]

_RESAMPLES: Final = 2000
_MAX_RESAMPLED: Final = 1000
"""With more values than this, the normal approximation is used."""
_Z: Final = 1.959964


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Interval of the mean of one value per task.

    Uses Wilson's interval for values of 0 and 1, otherwise the bootstrap-t. Also uses Wilson's for values in [0, 1]
    that vary so little that resamples have no variance; the interval is then too wide rather than too narrow.

    Returns:
        None for fewer than two values, and for values outside [0, 1] that hardly vary.
    """
    if len(values) < 2:
        return None
    found = None if set(values) <= {0, 1} else _bootstrap_t(values)
    if found is None and min(values) >= 0 and max(values) <= 1:
        found = wilson(statistics.fmean(values), len(values))
    return found


def paired_interval(differences: Sequence[float]) -> Interval | None:
    """Interval of a mean difference, from the difference of each task.

    Uses the interval of Agresti and Min for differences of -1, 0 and 1, and for other differences in [-1, 1] that
    hardly vary; otherwise the bootstrap-t.

    Returns:
        None for fewer than two values, and for values outside [-1, 1] that hardly vary.
    """
    if len(differences) < 2:
        return None
    found = None if set(differences) <= {-1, 0, 1} else _bootstrap_t(differences)
    return _agresti_min(differences) if found is None and max(map(abs, differences)) <= 1 else found


def unpaired_interval(one: Sequence[float], other: Sequence[float]) -> Interval | None:
    """Interval of the mean of ``one`` minus the mean of ``other``.

    Uses Newcombe's interval for values of 0 and 1, and for other values in [0, 1] that hardly vary; otherwise the
    bootstrap-t of Welch's statistic.

    Returns:
        None for fewer than two values in a group, and for values outside [0, 1] that hardly vary.
    """
    if min(len(one), len(other)) < 2:
        return None
    pool = {*one, *other}
    found = None if pool <= {0, 1} else _bootstrap_t(one, other)
    return _newcombe(one, other) if found is None and min(pool) >= 0 and max(pool) <= 1 else found


def wilson(mean: float, n: float) -> Interval:
    """Wilson's score interval of a rate.

    Wilson 1927, JASA 22; recommended for small n by Brown, Cai and DasGupta 2001, Interval estimation for a binomial
    proportion, Statistical Science 16, section 4.2.1.

    Args:
        mean: the observed rate.
        n: the number of observations; for clustered observations, the effective number.
    """
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return max(center - half, 0.0), min(center + half, 1.0)


def variance(values: Sequence[float]) -> float:
    """Sample variance; 0 for one value."""
    return _moments(values)[1] if len(values) > 1 else 0.0


def t_p_value(t: float, freedom: float) -> float:
    """Two-sided p-value of Student's t, by Simpson's rule over the angle atan(t / sqrt(freedom))."""
    start, steps = math.atan(abs(t) / math.sqrt(freedom)), 2000
    width = (math.pi / 2 - start) / steps
    heights: list[float] = [
        math.pow(max(math.cos(start + place * width), 0.0), freedom - 1) for place in range(steps + 1)
    ]
    area = (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])) * width / 3
    return area / _t_area(freedom)


@functools.lru_cache
def t_quantile(freedom: float) -> float:
    """The .975 quantile of Student's t, by Newton's method: from the left, because the p-value is convex."""
    quantile, step = 1.9, 1.0
    while abs(step) > 1e-4:
        density = math.cos(math.atan(quantile / math.sqrt(freedom))) ** (freedom + 1) / math.sqrt(freedom)
        step = (t_p_value(quantile, freedom) - 0.05) * _t_area(freedom) / density
        quantile += step
    return quantile


def _t_area(freedom: float) -> float:
    """The integral of cos(x) ** (freedom - 1) from 0 to pi / 2."""
    return math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))


def _newcombe(one: Sequence[float], other: Sequence[float]) -> Interval:
    """Newcombe 1998, Interval estimation for the difference between proportions, Stat. in Medicine 17, method 10."""
    means = statistics.fmean(one), statistics.fmean(other)
    (low, high), (other_low, other_high) = wilson(means[0], len(one)), wilson(means[1], len(other))
    difference = means[0] - means[1]
    return (
        difference - math.hypot(means[0] - low, other_high - means[1]),
        difference + math.hypot(high - means[0], means[1] - other_low),
    )


def _agresti_min(differences: Sequence[float]) -> Interval:
    """Agresti and Min 2005, Simple improved confidence intervals for comparing matched proportions, section 2.2.

    Half an observation is added to each of the four outcomes of a pair.
    """
    n = len(differences) + 2
    mean = math.fsum(differences) / n
    half = _Z * math.sqrt(max((math.fsum(d * d for d in differences) + 1) / n - mean**2, 0.0) / n)
    return max(mean - half, -1.0), min(mean + half, 1.0)


def _bootstrap_t(values: Sequence[float], minus: Sequence[float] = ()) -> Interval | None:
    """The bootstrap-t interval: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 12.5.

    Draws 2,000 resamples with a fixed seed from the sorted values, so that the order of the values has no effect.

    Returns:
        None if more than 2.5 % of the resamples on a side have no variance, so that the interval would be infinite.
    """
    samples = [sorted(sample) for sample in (values, minus) if sample]
    center, deviation = _estimate(samples)
    if deviation <= 1e-12:
        return None
    if sum(map(len, samples)) > _MAX_RESAMPLED:
        return center - _Z * deviation, center + _Z * deviation
    draw = random.Random(0)
    found = []
    for _ in range(_RESAMPLES):
        mean, error = _estimate([draw.choices(sample, k=len(sample)) for sample in samples])
        apart = mean - center
        found.append(apart / error if error > 1e-12 else math.copysign(math.inf, apart) if apart else 0.0)
    found.sort()
    low, high = found[round(0.025 * _RESAMPLES)], found[round(0.975 * _RESAMPLES) - 1]
    return (center - high * deviation, center - low * deviation) if math.isfinite(low + high) else None


def _estimate(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean of the first sample minus the mean of the second, if there is one, and its standard error."""
    found = [_moments(sample) for sample in samples]
    error = math.sqrt(sum(spread / len(sample) for (_, spread), sample in zip(found, samples, strict=True)))
    return found[0][0] - sum(mean for mean, _ in found[1:]), error


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample variance."""
    n, start = len(values), values[0]
    apart = [value - start for value in values]  # avoids cancellation
    total = sum(apart)
    spread = sum(map(operator.mul, apart, apart)) - total * total / n
    return start + total / n, max(spread, 0.0) / max(n - 1, 1)
