"""The calls in flight and the attempts that are over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import aiohttp

from agentlightning.errors import StoreError
from agentlightning.event import AttemptFinished, Event, RolloutFinished, RolloutStarted
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey
from agentlightning.types import LIVE_ATTEMPT
from agentlightning_plugins.gateway.call import ModelCall
from agentlightning_plugins.gateway.refusal import CallRefused

logger = logging.getLogger("agentlightning")
_KINDS: Final = ("rollout_started", "attempt_finished", "rollout_finished")
_MAX_REMEMBERED: Final = 100_000
_RECONNECT_S: Final = 1.0
_ASK_S: Final = 5.0


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call and the task that relays it."""

    call: ModelCall
    task: asyncio.Task[object]
    is_attempt_over: bool = False
    """Whether the task was cancelled because the attempt is over."""


class InFlightCalls:
    """The calls in flight on one event loop, by attempt."""

    def __init__(self) -> None:
        self._by_attempt: dict[AttemptKey | None, set[InFlightCall]] = {}

    @contextlib.contextmanager
    def track(self, call: ModelCall) -> Iterator[InFlightCall]:
        """Tracks a call that the current task relays.

        Raises:
            CallRefused: the attempt has ended, so the task was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        in_flight = InFlightCall(call, task)
        calls = self._by_attempt.setdefault(call.attempt, set())
        calls.add(in_flight)
        try:
            yield in_flight
        except asyncio.CancelledError:
            if not in_flight.is_attempt_over:
                raise
            task.uncancel()
            raise attempt_over(call.attempt) from None
        finally:
            calls.discard(in_flight)
            if not calls:
                del self._by_attempt[call.attempt]

    def cancel_attempt(self, attempt: AttemptKey) -> None:
        """Cancels the calls of an attempt."""
        for in_flight in self._by_attempt.get(attempt, ()):
            if not in_flight.is_attempt_over:
                in_flight.is_attempt_over = True
                in_flight.task.cancel()

    def cancel_rollout(self, rollout_id: str) -> None:
        """Cancels the calls of all attempts of a rollout."""
        for attempt in [key for key in self._by_attempt if key is not None and key[0] == rollout_id]:
            self.cancel_attempt(attempt)

    def __iter__(self) -> Iterator[ModelCall]:
        return (in_flight.call for calls in self._by_attempt.values() for in_flight in calls)


class EndedAttempts:
    """The attempts and rollouts that ended last, up to a limit, according to the store's events.

    If no event has announced the start of an attempt, the store is queried once, because the attempt may have ended
    before this gateway started. When an attempt ends, its calls in flight are cancelled.
    """

    def __init__(self, in_flight: InFlightCalls, limit: int = _MAX_REMEMBERED) -> None:
        self._in_flight = in_flight
        self._limit = limit
        self._live: dict[AttemptKey, None] = {}
        """Attempts that had not ended according to the latest event or query."""
        self._attempts: dict[AttemptKey, None] = {}
        self._rollouts: dict[str, set[str]] = {}
        """Ended rollouts, each with the attempts that began after its end (retries)."""

    def is_over(self, attempt: AttemptKey) -> bool:
        """Whether calls of this attempt must be refused."""
        retries = self._rollouts.get(attempt[0])
        return attempt in self._attempts or (retries is not None and attempt[1] not in retries)

    def refuse(self, attempt: AttemptKey) -> None:
        """Raises CallRefused if an attempt is over."""
        if self.is_over(attempt):
            raise attempt_over(attempt)

    async def ask(self, store: LightningStore, attempt: AttemptKey) -> None:
        """Reads from the store whether an attempt has ended, if no event has announced its start.

        An attempt that the store does not contain, or a store that does not answer, counts as not ended.
        """
        if attempt in self._live or self.is_over(attempt):
            return
        try:
            async with asyncio.timeout(_ASK_S):
                known = await store.query_attempts(attempt[0])
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("the status of attempt %s cannot be read, so its calls continue: %s", attempt[1], error)
            return
        if any(each.attempt_id == attempt[1] and each.status not in LIVE_ATTEMPT for each in known):
            self._add(self._attempts, attempt)
        elif not self.is_over(attempt):  # it may have ended meanwhile
            self._add(self._live, attempt)

    def _add(self, known: dict[AttemptKey, None], attempt: AttemptKey) -> None:
        known[attempt] = None
        if len(known) > self._limit:
            del known[next(iter(known))]

    def note(self, event: Event) -> None:
        """Applies an event of the store."""
        match event:
            case AttemptFinished():
                self._live.pop((event.rollout_id, event.attempt_id), None)
                self._add(self._attempts, (event.rollout_id, event.attempt_id))
                self._in_flight.cancel_attempt((event.rollout_id, event.attempt_id))
            case RolloutFinished():
                self._rollouts.pop(event.rollout_id, None)
                self._rollouts[event.rollout_id] = set()
                if len(self._rollouts) > self._limit:
                    del self._rollouts[next(iter(self._rollouts))]
                self._in_flight.cancel_rollout(event.rollout_id)
            case RolloutStarted():
                self._add(self._live, (event.rollout_id, event.attempt_id))
                if event.rollout_id in self._rollouts:
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
            self._live.clear()  # these attempts may have ended meanwhile


def attempt_over(attempt: AttemptKey | None) -> CallRefused:
    """Returns the error of calls of an attempt that has ended."""
    assert attempt is not None
    message = f"attempt {attempt[1]} of rollout {attempt[0]} is over; its calls are refused"
    return CallRefused(410, message, "attempt_over")
