"""The attempts that are over, known from the store's events, so that no call has to query the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agentlightning.event import AttemptFinished, Event, RolloutFinished, RolloutStarted
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")
_KINDS: Final = ("rollout_started", "attempt_finished", "rollout_finished")
_MAX_REMEMBERED: Final = 100_000
_RECONNECT_S: Final = 1.0


class EndedAttempts:
    """The attempts and rollouts that ended last, up to a limit. Unknown ones count as not ended."""

    def __init__(
        self,
        limit: int = _MAX_REMEMBERED,
        *,
        on_attempt: Callable[[tuple[str, str]], None] = lambda attempt: None,
        on_rollout: Callable[[str], None] = lambda rollout_id: None,
    ) -> None:
        """Starts empty.

        Args:
            limit: how many attempts, and how many rollouts, are remembered.
            on_attempt: called with each attempt that ends.
            on_rollout: called with each rollout that ends.
        """
        self._limit = limit
        self._on_attempt, self._on_rollout = on_attempt, on_rollout
        self._attempts: dict[tuple[str, str], None] = {}
        self._rollouts: dict[str, set[str]] = {}
        """Ended rollouts, each with the attempts that began after its end (retries)."""

    def is_over(self, attempt: tuple[str, str]) -> bool:
        """Whether calls of this attempt (rollout id, attempt id) must be refused."""
        retries = self._rollouts.get(attempt[0])
        return attempt in self._attempts or (retries is not None and attempt[1] not in retries)

    def note(self, event: Event) -> None:
        """Applies an event of the store."""
        match event:
            case AttemptFinished():
                self._attempts[event.rollout_id, event.attempt_id] = None
                if len(self._attempts) > self._limit:
                    del self._attempts[next(iter(self._attempts))]
                self._on_attempt((event.rollout_id, event.attempt_id))
            case RolloutFinished():
                self._rollouts.pop(event.rollout_id, None)
                self._rollouts[event.rollout_id] = set()
                if len(self._rollouts) > self._limit:
                    del self._rollouts[next(iter(self._rollouts))]
                self._on_rollout(event.rollout_id)
            case RolloutStarted() if event.rollout_id in self._rollouts:
                self._rollouts[event.rollout_id].add(event.attempt_id)
            case _:
                pass

    async def follow(self, store: LightningStore) -> None:
        """Applies the events of a store until cancelled; subscribes again after an error."""
        has_warned = False
        while True:
            try:
                async for event in store.subscribe(_KINDS):
                    self.note(event)
            except Exception as error:  # isolation point: after any error of the store, later events still count
                if not has_warned:
                    logger.warning(
                        "the gateway lost the store's events (%s) and subscribes again; until then it relays calls of "
                        "ended attempts",
                        error,
                    )
                    has_warned = True
            await asyncio.sleep(_RECONNECT_S)
