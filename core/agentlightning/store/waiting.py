"""Wake-ups: coroutines wait for events of the store without polling.

A ``Signal`` wakes one coroutine from any thread. ``Waiters`` listens to a backend and sets the signals that an event
concerns; an event costs time for these signals only, however many coroutines wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Collection, Iterable, Sequence

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event

MAX_UNREAD_EVENTS = 100_000


def deadline_after(timeout_s: float | None) -> float:
    """Returns the ``time.monotonic()`` at which a timeout ends; None never ends. A wrong number raises ConfigError."""
    if timeout_s is None:
        return math.inf
    if not timeout_s >= 0:  # also refuses NaN
        raise ConfigError(f"timeout={timeout_s}; it is a number of seconds, 0 or more")
    return time.monotonic() + timeout_s


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Signal:
    """Like ``asyncio.Event``, but any thread may call ``set``. Only the thread that made it may ``wait``."""

    __slots__ = ("_future", "_loop", "_thread_id", "is_set")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._future: asyncio.Future[None] | None = None
        self.is_set = False

    def set(self) -> None:
        """Wakes the waiting coroutine, or lets the next ``wait`` return immediately."""
        if self.is_set:
            return
        self.is_set = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if threading.get_ident() == self._thread_id:
                self._wake()
            else:
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, deadline: float = math.inf) -> bool:
        """Waits until it is set or ``time.monotonic()`` reaches ``deadline``; returns whether it is set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if deadline == math.inf else deadline - time.monotonic()):
                while not self.is_set:
                    self._future = self._loop.create_future()
                    await self._future
        return self.is_set


class Countdown(Signal):
    """A signal that is set when all of its rollouts have ended."""

    __slots__ = ("pending",)

    def __init__(self, rollout_ids: Iterable[str]) -> None:
        super().__init__()
        self.pending = set(rollout_ids)


class Subscription(Signal):
    """The unread events of one subscriber, in commit order."""

    __slots__ = ("has_overflowed", "kinds", "run_id", "unread")

    def __init__(self, run_id: str | None, kinds: Collection[str] | None) -> None:
        super().__init__()
        self.run_id = run_id
        self.kinds = kinds
        self.unread: deque[Event] = deque()
        self.has_overflowed = False

    def put(self, event: Event) -> None:
        if self.run_id not in (None, event.run_id) or (self.kinds is not None and event.kind not in self.kinds):
            return
        if len(self.unread) >= MAX_UNREAD_EVENTS:
            self.has_overflowed = True
        else:
            self.unread.append(event)
        self.set()


class Waiters:
    """All waits on one database: for queued rollouts, for their ends and for events. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: defaultdict[str, OrderedDict[Signal, None]] = defaultdict(OrderedDict)
        self._countdowns: dict[str, dict[Countdown, None]] = {}
        self._subscriptions: dict[Subscription, None] = {}
        self.closed = False

    def publish(self, events: Sequence[Event]) -> None:
        """Sets the signals that the events concern; a backend calls it as its listener."""
        signals: list[Signal] = []
        with self._lock:
            for event in events:
                if event.kind == "rollout_finished":
                    for countdown in self._countdowns.pop(event.rollout_id, ()):
                        countdown.pending.discard(event.rollout_id)
                        if not countdown.pending:
                            signals.append(countdown)
                elif event.kind == "rollout_enqueued":
                    signals += self._pop_queue(event.run_id)
                for subscription in self._subscriptions:
                    subscription.put(event)
        for signal in signals:
            signal.set()

    def join_queue(self, run_id: str) -> Signal:
        """Returns a signal that is set when a rollout may be in the queue of a run; each rollout sets one signal.

        The caller must finally call ``leave_queue``, which passes an unused signal on to the next in line.
        """
        signal = Signal()
        with self._lock:
            self._queues[run_id][signal] = None
        return signal

    def rejoin_queue(self, run_id: str, signal: Signal) -> None:
        """Puts a signal back at the head of the line, before its owner tries to claim again."""
        with self._lock:
            signal.is_set = False
            self._queues[run_id][signal] = None
            self._queues[run_id].move_to_end(signal, last=False)

    def leave_queue(self, run_id: str, signal: Signal) -> None:
        with self._lock:
            self._queues[run_id].pop(signal, None)
            next_in_line = self._pop_queue(run_id) if signal.is_set else []
        for waiting in next_in_line:
            waiting.set()

    def _pop_queue(self, run_id: str) -> list[Signal]:
        """Removes and returns the head of a line, if there is one. The caller holds the lock."""
        line = self._queues[run_id]
        return [line.popitem(last=False)[0]] if line else []

    def add(self, countdown: Countdown) -> None:
        with self._lock:
            for rollout_id in countdown.pending:
                self._countdowns.setdefault(rollout_id, {})[countdown] = None

    def discard(self, countdown: Countdown, rollout_ids: Iterable[str]) -> None:
        """Removes rollouts from a countdown: they ended before it was added, or the wait is over."""
        with self._lock:
            for rollout_id in rollout_ids:
                countdown.pending.discard(rollout_id)
                waiting = self._countdowns.get(rollout_id)
                if waiting is not None:
                    waiting.pop(countdown, None)
                    if not waiting:
                        del self._countdowns[rollout_id]

    async def events(self, run_id: str | None, kinds: Collection[str] | None) -> AsyncIterator[Event]:
        """Yields the events of a run (None: of all runs) from now on, until the iterator or this object is closed.

        Raises StoreError if the subscriber is too slow and events were dropped.
        """
        subscription = Subscription(run_id, kinds)
        with self._lock:
            self._subscriptions[subscription] = None
        try:
            while True:
                subscription.is_set = False
                while subscription.unread:
                    yield subscription.unread.popleft()
                if subscription.has_overflowed:
                    raise StoreError(
                        f"this subscriber left more than {MAX_UNREAD_EVENTS} events unread and has lost some; "
                        "read them faster, or subscribe to fewer kinds"
                    )
                if self.closed:
                    return
                await subscription.wait()
        finally:
            with self._lock:
                self._subscriptions.pop(subscription, None)

    def close(self) -> None:
        """Ends all waits."""
        with self._lock:
            self.closed = True
            signals: list[Signal] = [signal for line in self._queues.values() for signal in line]
            signals += [countdown for waiting in self._countdowns.values() for countdown in waiting]
            signals += self._subscriptions
        for signal in signals:
            signal.set()
