"""The calls under way, and how those of an attempt that is over are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from agentlightning_plugins.gateway.call import Call


class Flight:
    """One call under way, in the task that relays it."""

    __slots__ = ("call", "is_cut", "is_streaming", "task")

    def __init__(self, call: Call, task: asyncio.Task[object]) -> None:
        self.call = call
        self.task = task
        self.is_cut = False
        """Whether the task was cancelled because the attempt is over."""
        self.is_streaming = False
        """Whether the agent has got the head of an answer."""


class Flights:
    """Those of one event loop."""

    def __init__(self) -> None:
        self._by_attempt: dict[tuple[str, str] | None, set[Flight]] = {}

    def begin(self, call: Call) -> Flight:
        """Takes in a call that the current task relays; ``end`` must follow."""
        task = asyncio.current_task()
        assert task is not None
        flight = Flight(call, task)
        flights = self._by_attempt.get(call.attempt)
        if flights is None:
            flights = self._by_attempt[call.attempt] = set()
        flights.add(flight)
        return flight

    def end(self, flight: Flight) -> None:
        """Takes out a call."""
        flights = self._by_attempt[flight.call.attempt]
        flights.discard(flight)
        if not flights:
            del self._by_attempt[flight.call.attempt]

    def cut(self, attempt: tuple[str, str]) -> None:
        """Cancels the tasks of an attempt's calls."""
        for flight in self._by_attempt.get(attempt, ()):
            if not flight.is_cut:
                flight.is_cut = True
                flight.task.cancel()

    def cut_rollout(self, rollout_id: str) -> None:
        """The same for all attempts of a rollout."""
        for attempt in [key for key in self._by_attempt if key is not None and key[0] == rollout_id]:
            self.cut(attempt)

    def __iter__(self) -> Iterator[Call]:
        return (flight.call for flights in self._by_attempt.values() for flight in flights)
