"""Which attempts are over, learnt from the store's events, so that no call has to ask."""

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
    """The attempts and rollouts that ended last, oldest forgotten first; what it does not know is not over."""

    def __init__(
        self,
        limit: int = _MAX_REMEMBERED,
        *,
        on_attempt: Callable[[tuple[str, str]], None] = lambda attempt: None,
        on_rollout: Callable[[str], None] = lambda rollout_id: None,
    ) -> None:
        """Knows nothing yet.

        Args:
            limit: how many of each are remembered.
            on_attempt: told each attempt that ends.
            on_rollout: told each rollout that ends.
        """
        self._limit = limit
        self._on_attempt, self._on_rollout = on_attempt, on_rollout
        self._attempts: dict[tuple[str, str], None] = {}
        self._rollouts: dict[str, set[str]] = {}
        """Ended rollouts, each with the attempts that somebody began after its end: a retry."""

    def is_over(self, attempt: tuple[str, str]) -> bool:
        """Whether calls of this attempt (rollout id, attempt id) are to be refused."""
        if attempt in self._attempts:
            return True
        begun_later = self._rollouts.get(attempt[0])
        return begun_later is not None and attempt[1] not in begun_later

    def note(self, event: Event) -> None:
        """Takes in one event of the store."""
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
            case RolloutStarted():
                begun_later = self._rollouts.get(event.rollout_id)
                if begun_later is not None:
                    begun_later.add(event.attempt_id)
            case _:
                pass

    async def follow(self, store: LightningStore) -> None:
        """Notes the events of a store until cancelled; a lost connection is taken up again."""
        has_warned = False
        while True:
            try:
                async for event in store.subscribe(_KINDS):
                    self.note(event)
            except Exception as error:  # isolation point: whatever the store raises, later events are to be noted
                if not has_warned:
                    logger.warning(
                        "the gateway lost the store's events (%s) and tries again; until then it lets calls of ended "
                        "attempts through",
                        error,
                    )
                    has_warned = True
            await asyncio.sleep(_RECONNECT_S)
