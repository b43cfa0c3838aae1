"""The base class of adapters."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from agentlightning.errors import AdapterError
from agentlightning.records import Attempt, Span

To = TypeVar("To", covariant=True)
logger = logging.getLogger("agentlightning")


class TraceAdapter(ABC, Generic[To]):
    """Converts the spans of one attempt, in the order of their arrival, to the training data of an algorithm."""

    @abstractmethod
    def adapt(self, source: Sequence[Span], /) -> To:
        """Converts spans, without side effects; raises AdapterError if that is impossible."""

    def adapt_attempt(self, attempt: Attempt, spans: Sequence[Span]) -> To | None:
        """Converts the spans of a finished attempt.

        Returns None, with a warning, if spans were lost, because the rest would be misleading training data.
        """
        if not attempt.spans_dropped:
            return self.adapt(spans)
        logger.warning(
            "attempt %s of rollout %s is left out: %d of its spans were lost, because they exceeded a quota "
            "(AGL_ATTEMPT_MIB), or the store was too slow or unreachable for longer than a queue of 64 MB could buffer",
            attempt.attempt_id,
            attempt.rollout_id,
            attempt.spans_dropped,
        )
        return None


@contextlib.contextmanager
def reading(spans: Sequence[Span]) -> Iterator[None]:
    """Raises AdapterError for attributes of an unexpected form, because any program may write spans."""
    try:
        yield
    except AdapterError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        where = f"attempt {spans[0].attempt_id} of rollout {spans[0].rollout_id}"
        raise AdapterError(f"the spans of {where} cannot be read ({type(error).__name__}: {error})") from error
