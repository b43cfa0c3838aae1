"""``Retention``, a policy that deletes old rollouts."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from agentlightning.errors import ConfigError
from agentlightning.store.backend import Backend
from agentlightning.store.retention import ENDED, delete_in_order


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping ended rollouts with their attempts and spans.

    The process that owns the store deletes all other ended rollouts, in the order of enqueueing. Queued and running
    rollouts are never deleted.
    """

    max_age_s: float | None = None
    """Rollouts that ended more than this many seconds ago are deleted."""
    max_rollouts: int | None = None
    """The oldest ended rollouts are deleted while the database holds more than this, of all runs and statuses."""

    def __post_init__(self) -> None:
        for name in ("max_age_s", "max_rollouts"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value}; it can be 0 or more, or None for no limit")

    async def __call__(self, backend: Backend, now: float) -> AsyncGenerator[int]:
        """Deletes the rollouts that the policy does not keep; yields how many each slice of the work deleted."""
        if self.max_age_s is not None:
            async for deleted in delete_in_order(backend, (ENDED,), now - self.max_age_s, math.inf):
                yield deleted
        if self.max_rollouts is not None:
            excess = (await backend.count())["rollouts"] - self.max_rollouts
            async for deleted in delete_in_order(backend, (ENDED,), math.inf, excess):
                yield deleted
