"""Tasks of the game of stones, and their splits.

Every task can be won. Validation and test games begin with more stones than any training game, so that their first
moves are new to the model.
"""

from __future__ import annotations

import random
from typing import Literal, TypedDict

from examples.game.rules import is_won

Split = Literal["train", "val", "test"]
HEAPS = {"train": range(5, 20), "val": range(20, 26), "test": range(26, 34)}
STRENGTH = 0.5


class Problem(TypedDict):
    """One task of the agent: the number of stones, and the opponent's strength and random seed."""

    stones: int
    strength: float
    seed: int


def make_problems(split: Split, count: int) -> list[Problem]:
    """Returns problems of a split; every heap occurs once before any heap occurs again."""
    rng = random.Random(split)
    heaps: list[int] = []
    while len(heaps) < count:
        won = [heap for heap in HEAPS[split] if is_won(heap)]
        heaps += rng.sample(won, len(won))
    return [Problem(stones=heap, strength=STRENGTH, seed=seed) for seed, heap in enumerate(heaps[:count])]


def train() -> list[Problem]:
    """The training split."""
    return make_problems("train", 4096)


def val() -> list[Problem]:
    """The validation split."""
    return make_problems("val", 96)


def test() -> list[Problem]:
    """The test split."""
    return make_problems("test", 200)
