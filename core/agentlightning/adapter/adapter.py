"""Base classes of adapters."""

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
    """A pure conversion with settings."""

    @abstractmethod
    def adapt(self, source: From, /) -> To:
        """Converts ``source``; raises AdapterError if that is impossible."""


class TraceAdapter(Adapter[Sequence[Span], To]):
    """Converts the spans of one attempt, in the order of their arrival, to the training data of an algorithm."""

    def adapt_attempt(self, attempt: Attempt, spans: Sequence[Span]) -> To | None:
        """Converts the spans of a finished attempt; None, with a warning, if some were lost: the rest would mislead."""
        if not attempt.spans_dropped:
            return self.adapt(spans)
        logger.warning(
            "attempt %s of rollout %s is left out: %d of its spans were lost, because the store was too slow or "
            "unreachable for longer than the queue of 64 MB could buffer",
            attempt.attempt_id,
            attempt.rollout_id,
            attempt.spans_dropped,
        )
        return None
