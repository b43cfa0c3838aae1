"""What adapters have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from agentlightning.types import Attempt, Span

From = TypeVar("From", contravariant=True)
To = TypeVar("To", covariant=True)
logger = logging.getLogger("agentlightning")


class Adapter(ABC, Generic[From, To]):
    """Turns one thing into another: a pure function with settings."""

    @abstractmethod
    def adapt(self, source: From, /) -> To:
        """Converts.

        Raises:
            AdapterError: ``source`` cannot be converted.
        """


class TraceAdapter(Adapter[Sequence[Span], To]):
    """Turns the spans of one attempt, in the order of their arrival, into what an algorithm trains on."""

    def adapt_attempt(self, attempt: Attempt, spans: Sequence[Span]) -> To | None:
        """Converts what an attempt left in the store.

        Args:
            attempt: whose spans these are, as it ended.
            spans: of this attempt only.

        Returns:
            None, with a warning, when some of its spans were lost: what is left may say something else than happened.

        Raises:
            AdapterError: as ``adapt``.
        """
        if attempt.spans_dropped:
            logger.warning(
                "attempt %s of rollout %s is left out: %d of its spans were lost; the store was too slow or out of "
                "reach for longer than the queue of 64 MB could bridge",
                attempt.attempt_id,
                attempt.rollout_id,
                attempt.spans_dropped,
            )
            return None
        return self.adapt(spans)
