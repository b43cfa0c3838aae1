"""95 % intervals of means and of differences between means, and p-values, without assuming a distribution."""

from __future__ import annotations

import functools
import itertools
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
_MAX_EXACT: Final = 13


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Interval of the mean of one value per task.

    Uses Wilson's interval for values of 0 and 1, otherwise the bootstrap-t. Also uses Wilson's for values in [0, 1]
    that vary so little that resamples have no variance; the interval is then too wide rather than too narrow. Returns
    None for fewer than two values, and for values outside [0, 1] that hardly vary.
    """
    if len(values) < 2:
        return None
    found = None if set(values) <= {0, 1} else _bootstrap_t(values, confidence=confidence)
    if found is None and min(values) >= 0 and max(values) <= 1:
        found = wilson(statistics.fmean(values), len(values), confidence)
    return found


def paired_interval(differences: Sequence[float]) -> Interval | None:
    """Interval of a mean difference, from the difference of each task.

    Uses the interval of Agresti and Min for differences of -1, 0 and 1, and for other differences in [-1, 1] that
    hardly vary; otherwise the bootstrap-t. None for fewer than two values, and for others that hardly vary.
    """
    if len(differences) < 2:
        return None
    found = None if set(differences) <= {-1, 0, 1} else _bootstrap_t(differences)
    return _agresti_min(differences) if found is None and max(map(abs, differences)) <= 1 else found


def unpaired_interval(one: Sequence[float], other: Sequence[float]) -> Interval | None:
    """Interval of the mean of ``one`` minus the mean of ``other``.

    Uses Newcombe's interval for values of 0 and 1, and for other values in [0, 1] that hardly vary; otherwise the
    bootstrap-t of Welch's statistic. None for fewer than two values in a group, and for others that hardly vary.
    """
    if min(len(one), len(other)) < 2:
        return None
    pool = {*one, *other}
    found = None if pool <= {0, 1} else _bootstrap_t(one, other)
    return _newcombe(one, other) if found is None and min(pool) >= 0 and max(pool) <= 1 else found


def wilson(mean: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a rate.

    Wilson 1927, JASA 22; recommended for small n by Brown, Cai and DasGupta 2001, Interval estimation for a binomial
    proportion, Statistical Science 16, section 4.2.1. For clustered observations, ``n`` is their effective number.
    """
    z = normal_quantile(confidence)
    center = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    return max(center - half, 0.0), min(center + half, 1.0)


def normal_quantile(confidence: float) -> float:
    """Returns how many standard deviations an interval of this confidence reaches to each side; 1.96 for .95."""
    return statistics.NormalDist().inv_cdf(0.5 + confidence / 2)


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


def _bootstrap_t(values: Sequence[float], minus: Sequence[float] = (), confidence: float = 0.95) -> Interval | None:
    """The bootstrap-t interval: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 12.5.

    Draws 2,000 resamples with a fixed seed from the sorted values, so that the order of the values has no effect. None
    if too many of the resamples on a side have no variance (2.5 % for .95), so that the interval would be infinite.
    """
    samples = [sorted(sample) for sample in (values, minus) if sample]
    center, deviation = _estimate(samples)
    if deviation <= 1e-12:
        return None
    if sum(map(len, samples)) > _MAX_RESAMPLED:
        half = normal_quantile(confidence) * deviation
        return center - half, center + half
    draw = random.Random(0)
    found = []
    for _ in range(_RESAMPLES):
        mean, error = _estimate([draw.choices(sample, k=len(sample)) for sample in samples])
        apart = mean - center
        found.append(apart / error if error > 1e-12 else math.copysign(math.inf, apart) if apart else 0.0)
    found.sort()
    tail = round((1 - confidence) / 2 * _RESAMPLES)
    low, high = found[tail], found[_RESAMPLES - tail - 1]
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


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean difference of 0, by a permutation test that flips signs.

    Exact for up to 13 differences; otherwise by random signs with a fixed seed, for the sorted differences, so that the
    order of the differences has no effect. The observed signs are counted too, so that the p-value is never 0 (Phipson
    and Smyth 2010, arXiv:1603.05766).
    """
    ordered = sorted(differences)
    observed = abs(math.fsum(ordered)) - 1e-9 * math.fsum(map(abs, ordered))
    if len(ordered) <= _MAX_EXACT:
        signs = itertools.product((1, -1), repeat=len(ordered))
        extreme = [abs(sum(s * d for s, d in zip(sign, ordered, strict=True))) >= observed for sign in signs]
        return sum(extreme) / len(extreme)
    if len(ordered) > _MAX_RESAMPLED:
        deviation = math.sqrt(variance(ordered) * len(ordered))
        return math.erfc(abs(math.fsum(ordered)) / deviation / math.sqrt(2)) if deviation > 0 else float(not observed)
    draw, hits = random.Random(0), 0
    for _ in range(_RESAMPLES):
        flips = draw.getrandbits(len(ordered))
        flipped = math.fsum(d if flips >> place & 1 else -d for place, d in enumerate(ordered))
        hits += abs(flipped) >= observed
    return (hits + 1) / (_RESAMPLES + 1)


def unpaired_p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p-value of equal means, by a studentized permutation test.

    Splits the pooled values at random and compares Welch's t statistic, which keeps the level when the variances differ
    (Chung and Romano 2013, Exact and asymptotically robust permutation tests, arXiv:1304.5939, theorem 2.2); it is
    exact when the distributions are equal. All splits are tried if there are at most 8,192, otherwise random splits
    with a fixed seed.
    """
    pool, size = sorted([*one, *other]), len(one)
    observed = _welch(one, other) * (1 - 1e-9)
    if math.comb(len(pool), size) <= 2**_MAX_EXACT:
        found = []
        for chosen in itertools.combinations(range(len(pool)), size):
            rest = set(range(len(pool))).difference(chosen)
            found.append(_welch([pool[place] for place in chosen], [pool[place] for place in rest]) >= observed)
        return sum(found) / len(found)
    if len(pool) > _MAX_RESAMPLED:
        return math.erfc(observed / math.sqrt(2))
    draw, hits = random.Random(0), 0
    for _ in range(_RESAMPLES):
        draw.shuffle(pool)
        hits += _welch(pool[:size], pool[size:]) >= observed
    return (hits + 1) / (_RESAMPLES + 1)


def reconcile(interval: Interval, p_value: float, mean: float) -> Interval:
    """Makes a 95 % interval agree with a p-value: widens it to 0 if the test at 5 % does not reject, else cuts it at 0.

    The interval and the p-value come from different methods, which can disagree when p is close to .05. A cut removes
    the differences whose sign is not the sign of the mean; the test rejects these at 2.5 %. The mean decides
    because the middle of a skewed interval may lie on the other side of 0.
    """
    low, high = interval
    if p_value > 0.05:
        return min(low, 0.0), max(high, 0.0)
    return (max(low, 0.0), high) if mean > 0 else (low, min(high, 0.0))


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Adjusts the p-values of several comparisons: any false positive below .05 has a probability of at most 5 %.

    Holm 1979, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min((len(p_values) - rank) * p_values[place], 1.0))
        adjusted[place] = largest
    return adjusted


def _welch(one: Sequence[float], other: Sequence[float]) -> float:
    """The absolute value of Welch's t statistic."""
    difference = abs(statistics.fmean(one) - statistics.fmean(other))
    deviation = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    if difference <= 1e-12:
        return 0.0
    return difference / deviation if deviation > 1e-12 else math.inf
