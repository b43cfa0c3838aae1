"""Components that choose tasks and rollouts, or change rewards and metrics."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from agentlightning.types import Triplet
from agentlightning_algorithms.grpo.learning.episode import Episode
from agentlightning_algorithms.grpo.sampling import flatten
from agentlightning_algorithms.grpo.settings import GRPOSettings


def shuffled(size: int, count: int, position: int, *, seed: int, rewards: Mapping[int, float]) -> list[int]:
    """The task sampler ``shuffled``: an endless sequence of shuffled epochs, read from ``position`` on."""
    orders: dict[int, list[int]] = {}
    chosen = []
    for place in range(position, position + count):
        epoch, offset = divmod(place, size)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{seed}-{epoch}").sample(range(size), size)
        chosen.append(orders[epoch][offset])
    return chosen


def undecided(size: int, count: int, position: int, *, seed: int, rewards: Mapping[int, float]) -> list[int]:
    """The task sampler ``undecided``: from twice as many shuffled tasks, those whose last mean reward is nearest 0.5.

    Tasks that have not been tried count as 0.5. Groups of tasks that always or never succeed teach nothing.
    """
    pool = list(dict.fromkeys(shuffled(size, 2 * count, 2 * position, seed=seed, rewards=rewards)))
    pool.sort(key=lambda index: abs(rewards.get(index, 0.5) - 0.5))
    return [pool[i % len(pool)] for i in range(count)]


def finished(episodes: Sequence[Episode], settings: GRPOSettings) -> Sequence[Episode]:
    """The rollout filter ``finished``: only rollouts that did not fail and in which no answer was cut off."""
    return [e for e in episodes if e.reward is not None and not any(map(_is_cut_off, e.triplets))]


def soft_overlong(episode: Episode, settings: GRPOSettings) -> float | None:
    """The reward shaping ``soft_overlong`` (DAPO, arXiv:2503.14476): penalises answers in the last fifth of max_tokens.

    The reward falls linearly by up to 1 with the length of the longest answer.
    """
    sampling = flatten(settings.sampling or {})
    limit = sampling.get("max_tokens") or sampling.get("max_completion_tokens")
    if episode.reward is None or not limit:
        return episode.reward
    longest = max((len(triplet.response.get("token_ids") or ()) for triplet in episode.triplets), default=0)
    margin = max(1.0, limit / 5)
    return float(episode.reward - min(1.0, max(0.0, (longest - (limit - margin)) / margin)))


def pass_at_k(episodes: Sequence[Episode], threshold: float = 1.0) -> dict[str, float]:
    """The metrics ``pass_at_k``: the chance that at least one of k rollouts of a task succeeds, for k = 1, 2, 4, ...

    Unbiased over the n rollouts of each task (Chen et al. 2021, arXiv:2107.03374): 1 - C(n - c, k) / C(n, k).
    """
    groups: dict[object, list[bool]] = {}
    for episode in episodes:
        task = (episode.rollout.metadata or {}).get("task_id", episode.group)
        groups.setdefault(task, []).append(episode.reward is not None and episode.reward >= threshold)
    if not groups:
        return {}
    least = min(map(len, groups.values()))

    def estimate(k: int) -> float:
        return sum(1 - math.comb(len(g) - sum(g), k) / math.comb(len(g), k) for g in groups.values()) / len(groups)

    return {f"pass@{k}": estimate(k) for k in (2**i for i in range(least.bit_length()))}


def _is_cut_off(triplet: Triplet) -> bool:
    return triplet.metadata.get("finish_reason") == "length"
