"""Confidence intervals and p-values of means, without assuming a distribution."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Final

_RESAMPLES: Final = 2000
_MAX_RESAMPLED: Final = 2000
"""With more values than this, the normal approximation is used."""
_MAX_EXACT: Final = 13


def mean_interval(values: Sequence[float], minus: Sequence[float] = ()) -> tuple[float, float]:
    """95 % interval of the mean of ``values`` minus the mean of ``minus``.

    Percentile bootstrap (Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13), 2,000 resamples with
    a fixed seed; the normal approximation for more than 2,000 values.
    """
    samples = [list(values), list(minus)] if minus else [list(values)]
    if sum(map(len, samples)) > _MAX_RESAMPLED:
        middle = statistics.fmean(values) - (statistics.fmean(minus) if minus else 0.0)
        half = 1.959964 * math.sqrt(sum(_variance(sample) / len(sample) for sample in samples))
        return middle - half, middle + half
    draw = random.Random(0)
    found = []
    for _ in range(_RESAMPLES):
        mean, *others = (statistics.fmean(draw.choices(sample, k=len(sample))) for sample in samples)
        found.append(mean - sum(others))
    found.sort()
    return found[int(0.025 * _RESAMPLES)], found[int(0.975 * _RESAMPLES)]


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean difference of 0, by a permutation test that flips signs.

    Exact up to 13 differences, else by random signs with a fixed seed. It counts the observed signs and so is never 0
    (Phipson and Smyth 2010, arXiv:1603.05766).
    """
    observed = abs(sum(differences)) - 1e-12
    if len(differences) <= _MAX_EXACT:
        signs = itertools.product((1, -1), repeat=len(differences))
        extreme = [abs(sum(s * d for s, d in zip(sign, differences, strict=True))) >= observed for sign in signs]
        return sum(extreme) / len(extreme)
    if len(differences) > _MAX_RESAMPLED:
        return _two_sided(sum(differences), math.sqrt(sum(d * d for d in differences)))
    draw = random.Random(0)
    hits = sum(abs(sum(draw.choice((d, -d)) for d in differences)) >= observed for _ in range(_RESAMPLES))
    return (hits + 1) / (_RESAMPLES + 1)


def unpaired_p_value(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p-value of equal means, by a permutation test that splits the pooled values at random."""
    pool, total, size = [*one, *other], math.fsum([*one, *other]), len(one)

    def difference(sum_of_one: float) -> float:
        return abs(sum_of_one / size - (total - sum_of_one) / len(other))

    observed = difference(math.fsum(one)) - 1e-12
    if math.comb(len(pool), size) <= 2**_MAX_EXACT:
        found = [difference(math.fsum(chosen)) >= observed for chosen in itertools.combinations(pool, size)]
        return sum(found) / len(found)
    if len(pool) > _MAX_RESAMPLED:
        return _two_sided(observed, math.sqrt(_variance(pool) * (1 / size + 1 / len(other))))
    draw = random.Random(0)
    hits = sum(difference(math.fsum(draw.sample(pool, size))) >= observed for _ in range(_RESAMPLES))
    return (hits + 1) / (_RESAMPLES + 1)


def _two_sided(value: float, deviation: float) -> float:
    return math.erfc(abs(value) / deviation / math.sqrt(2)) if deviation > 0 else 1.0


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0
