"""P-values of differences between means, without assuming a distribution."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Final

from agentlightning_plugins.shared.statistics.interval import Interval, variance

_RESAMPLES: Final = 2000
_MAX_RESAMPLED: Final = 1000
"""With more values than this, the normal approximation is used."""
_MAX_EXACT: Final = 13
_SIGNIFICANT: Final = 0.05


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean difference of 0, by a permutation test that flips signs.

    Exact for up to 13 differences; otherwise by random signs with a fixed seed, for the sorted differences, so that the
    order of the differences has no effect. The observed signs are counted too, so that the p-value is never 0 (Phipson
    and Smyth 2010, arXiv:1603.05766).

    Args:
        differences: the differences, at least one.
    """
    ordered = sorted(differences)
    observed = abs(math.fsum(ordered)) - 1e-9 * math.fsum(map(abs, ordered))
    if len(ordered) <= _MAX_EXACT:
        signs = itertools.product((1, -1), repeat=len(ordered))
        extreme = [abs(sum(s * d for s, d in zip(sign, ordered, strict=True))) >= observed for sign in signs]
        return sum(extreme) / len(extreme)
    if len(ordered) > _MAX_RESAMPLED:
        return _two_sided(math.fsum(ordered), math.sqrt(variance(ordered) * len(ordered)))
    draw = random.Random(0)
    hits = 0
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
    draw = random.Random(0)
    hits = 0
    for _ in range(_RESAMPLES):
        draw.shuffle(pool)
        hits += _welch(pool[:size], pool[size:]) >= observed
    return (hits + 1) / (_RESAMPLES + 1)


def reconcile(interval: Interval, p_value: float, mean: float) -> Interval:
    """Makes a 95 % interval agree with a p-value: widens it to 0 if the test at 5 % does not reject, else cuts it at 0.

    The interval and the p-value come from different methods, which can disagree when p is close to .05. A cut removes
    the differences whose sign is not that of the estimated mean, which the test rejects at 2.5 %. The mean decides
    because the middle of a skewed interval may lie on the other side of 0.
    """
    low, high = interval
    if p_value > _SIGNIFICANT:
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


def _two_sided(value: float, deviation: float) -> float:
    if deviation <= 0:
        return 1.0 if value == 0 else 0.0
    return math.erfc(abs(value) / deviation / math.sqrt(2))
