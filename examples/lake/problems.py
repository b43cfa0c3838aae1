"""Tasks of the frozen lake: a seed decides where the holes are. No lake of one split occurs in another."""

from __future__ import annotations

import functools
import random

from agentlightning_plugins.environments.textarena import TextArenaEnvironment

N_TEST, N_VAL = 80, 40


def test() -> list[dict[str, int]]:
    """The test split."""
    return [{"seed": seed} for seed in seeds()[:N_TEST]]


def val() -> list[dict[str, int]]:
    """The validation split."""
    return [{"seed": seed} for seed in seeds()[N_TEST : N_TEST + N_VAL]]


def train() -> list[dict[str, int]]:
    """The training split."""
    return [{"seed": seed} for seed in seeds()[N_TEST + N_VAL :]]


@functools.cache
def seeds() -> list[int]:
    """Returns a seed of each lake, in a random order."""
    game = TextArenaEnvironment("FrozenLake-v0")
    by_lake = {game.reset({}, seed): seed for seed in range(3000)}
    found = sorted(by_lake.values())
    random.Random(0).shuffle(found)
    return found
