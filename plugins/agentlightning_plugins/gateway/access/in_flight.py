"""The calls in flight, which are cancelled when their attempt ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from agentlightning_plugins.gateway.recording.call import Call


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call and the task that relays it."""

    call: Call
    task: asyncio.Task[object]
    is_attempt_over: bool = False
    """Whether the task was cancelled because the attempt is over."""
    is_streaming: bool = False
    """Whether the agent has got the head of an answer."""


class InFlightCalls:
    """The calls of one event loop, by their attempt."""

    def __init__(self) -> None:
        self._by_attempt: dict[tuple[str, str] | None, set[InFlightCall]] = {}

    def add(self, call: Call) -> InFlightCall:
        """Adds a call that the current task relays."""
        task = asyncio.current_task()
        assert task is not None
        in_flight = InFlightCall(call, task)
        self._by_attempt.setdefault(call.attempt, set()).add(in_flight)
        return in_flight

    def remove(self, in_flight: InFlightCall) -> None:
        calls = self._by_attempt[in_flight.call.attempt]
        calls.discard(in_flight)
        if not calls:
            del self._by_attempt[in_flight.call.attempt]

    def cancel_attempt(self, attempt: tuple[str, str]) -> None:
        """Cancels the calls of an attempt."""
        for in_flight in self._by_attempt.get(attempt, ()):
            if not in_flight.is_attempt_over:
                in_flight.is_attempt_over = True
                in_flight.task.cancel()

    def cancel_rollout(self, rollout_id: str) -> None:
        """Cancels the calls of all attempts of a rollout."""
        for attempt in [key for key in self._by_attempt if key is not None and key[0] == rollout_id]:
            self.cancel_attempt(attempt)

    def __iter__(self) -> Iterator[Call]:
        return (in_flight.call for calls in self._by_attempt.values() for in_flight in calls)
