"""Parts of ``grpo``: two losses, two estimators, and a part of every other kind. Functions have settings."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.plugin import Component, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from agentlightning.plugin import Aggregated, Episode, Scored, Surrogate, TaskHistory, UpdateSettings

plugin_interface = 1


def soft_gate(
    logprob_BT: Tensor,
    old_logprob_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    settings: UpdateSettings,
    *,
    temperature: float = 1.0,
) -> Surrogate:
    """A soft gate in the place of the clip: sigmoid(t (ratio - 1)) 4 / t."""
    import torch

    from agentlightning.plugin import Surrogate

    log_ratio_BT = (logprob_BT - old_logprob_BT).clamp(-20.0, 20.0)
    gate_BT = torch.sigmoid(temperature * (log_ratio_BT.exp() - 1.0)) * 4.0 / temperature
    zero_BT = torch.zeros_like(logprob_BT)
    return Surrogate(-advantage_BT * gate_BT, log_ratio_BT.detach(), zero_BT, zero_BT)


class Reinforce:
    """The plain policy gradient, as a class with a setting."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(
        self,
        logprob_BT: Tensor,
        old_logprob_BT: Tensor,
        advantage_BT: Tensor,
        mask_BT: Tensor,
        settings: UpdateSettings,
    ) -> Surrogate:
        import torch

        from agentlightning.plugin import Surrogate

        zero_BT = torch.zeros_like(logprob_BT)
        loss_BT = -self.scale * advantage_BT * logprob_BT
        return Surrogate(loss_BT, (logprob_BT - old_logprob_BT).detach(), zero_BT, zero_BT)


def maxrl(items: Sequence[Scored], *, std_floor: float, temperature: float = 1.0) -> list[float]:
    """The difference from the mean of the group, divided by the mean."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for item in items:
        groups[item.group].append(item.value)
    means = {group: statistics.fmean(values) for group, values in groups.items()}
    return [(item.value - means[item.group]) / (temperature * max(abs(means[item.group]), std_floor)) for item in items]


def ranks(items: Sequence[Scored], *, std_floor: float) -> list[float]:
    """The share of the group that is worse, minus the share that is better."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for item in items:
        groups[item.group].append(item.value)

    def advantage(item: Scored) -> float:
        values = groups[item.group]
        return (sum(value < item.value for value in values) - sum(value > item.value for value in values)) / len(values)

    return [advantage(item) for item in items]


def square_root(length_B: Tensor, weight_B: Tensor, rollout_length_B: Tensor, horizon: int) -> Aggregated:
    """Each row counts with the root of its length."""
    from agentlightning.plugin import Aggregated

    return Aggregated(weight_B / length_B.clamp(min=1).sqrt(), weight_B.sum())


def warmup(progress: float, *, share: float = 0.1) -> float:
    return min(1.0, progress / share) if share else 1.0


def hardest(count: int, history: TaskHistory) -> list[int]:
    """Tasks with the lowest newest reward first; unknown ones before these."""
    order = list(range(len(history.data)))
    random.Random(history.seed + history.position).shuffle(order)
    newest = {index: history.newest(index) for index in order}
    order.sort(key=lambda index: -math.inf if (reward := newest[index]) is None else reward)
    return [order[number % len(order)] for number in range(count)]


def brief(episode: Episode, group: Sequence[Episode], settings: Any, *, weight: float = 0.1) -> float | None:
    """Less reward for every call beyond the first."""
    return None if episode.reward is None else episode.reward - weight * max(0, len(episode.triplets) - 1)


def rewarded(episodes: Sequence[Episode], settings: Any) -> list[Episode]:
    return [episode for episode in episodes if episode.reward is not None]


def spread(episodes: Sequence[Episode]) -> dict[str, float]:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return {"reward_spread": max(rewards) - min(rewards)} if rewards else {}


PARTS = {
    "policy_loss": ("soft_gate", "reinforce"),
    "advantage": ("maxrl", "ranks"),
    "aggregation": ("square_root",),
    "schedule": ("warmup",),
    "task_sampler": ("hardest",),
    "reward_shaping": ("brief",),
    "rollout_filter": ("rewarded",),
    "training_metrics": ("spread",),
}


@hookimpl
def components() -> list[Component]:
    classes = {"reinforce": "Reinforce"}
    return [
        Component(kind, name, f"{__name__}:{classes.get(name, name)}", summary="an example")
        for kind, names in PARTS.items()
        for name in names
    ]
