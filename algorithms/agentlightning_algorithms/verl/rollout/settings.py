"""The settings of rollouts for verl."""

# No ``from __future__ import annotations``: the types are read in the module of the subclass.
from dataclasses import dataclass
from typing import get_args

from agentlightning.errors import ConfigError
from agentlightning_algorithms.verl.rollout.batch_row import RowKind


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutSettings:
    """Settings that ``VERL`` passes on to the rollout controller."""

    rows: RowKind = "trajectory"
    """The rows that verl trains on: ``trajectory`` joins the calls of a rollout where a prompt continues the tokens
    before it, ``transition`` makes a row of every call."""
    failed_reward: float = 0.0
    """Reward of a rollout that failed, has no reward, or has spans that cannot be used."""
    rollout_timeout_s: float = 600.0
    """Seconds after which a rollout is stopped and counts as failed."""
    drain_timeout_s: float = 600.0
    """Seconds that calls in flight have to end before weights change; after that they are aborted."""
    resource_name: str = "llm"
    """Name of the resource by which agents receive the model."""

    def __post_init__(self) -> None:
        if self.rows not in get_args(RowKind):
            raise ConfigError(f"rows = {self.rows!r}; one of: {', '.join(get_args(RowKind))}")
        for name in ("rollout_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: a number above 0 is needed")
