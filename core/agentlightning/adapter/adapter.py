"""What adapters have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from agentlightning.types import Span

From = TypeVar("From", contravariant=True)
To = TypeVar("To", covariant=True)


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
