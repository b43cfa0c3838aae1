"""Credit rules that depend on rewards only."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_plugins.credit.shared import CreditRule, Step


class IdenticalCredit(CreditRule):
    """Every call gets the final reward, as without a rule."""

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        return [final_reward] * len(steps)

    def compared_turns(self, steps: Sequence[Step]) -> Sequence[int | str | None]:
        """Compares whole rollouts."""
        return [None] * len(steps)


class DiscountedCredit(CreditRule):
    """The discounted return-to-go: ``G_t = r_t + gamma * G_{t+1}``.

    ``r_t`` is the sum of the rewards emitted right after call t or linked to it, else 0. See
    Sutton and Barto, Reinforcement Learning (2018), equation 3.9; a step is a model call.
    """

    def __init__(self, gamma: float = 0.95) -> None:
        """Sets the discount of a reward that comes one call later, from 0 to 1."""
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"gamma = {gamma}: give a discount from 0 to 1")
        self.gamma = gamma

    def assign(self, steps: Sequence[Step], final_reward: float | None) -> Sequence[float | None]:
        if all(step.reward is None for step in steps):  # the attempt failed, or emitted no rewards
            return [None] * len(steps)
        returns: list[float] = []
        following = 0.0
        for step in reversed(steps):
            following = (step.reward or 0.0) + self.gamma * following
            returns.append(following)
        return returns[::-1]


class NearestCredit(DiscountedCredit):
    """A call gets its own rewards only: ``DiscountedCredit`` with a gamma of 0."""

    def __init__(self) -> None:
        super().__init__(gamma=0.0)


@hookimpl
def components() -> list[Component]:
    module = "agentlightning_plugins.credit.standard"
    return [
        Component("credit", "identical", f"{module}:IdenticalCredit", summary="the final reward for all calls"),
        Component("credit", "nearest", f"{module}:NearestCredit", summary="rewards of the nearest call"),
        Component("credit", "discounted", f"{module}:DiscountedCredit", summary="discounted return-to-go"),
    ]
