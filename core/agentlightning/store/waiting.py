"""Wake-ups: how a coroutine waits for an event of the store without asking again and again.

A ``Bell`` wakes one coroutine from any thread. ``Waiters`` listens to a backend and rings the bells that an event is
for, at a cost that depends on those bells only, however many others are waiting.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence

from agentlightning.errors import ConfigError, StoreError
from agentlightning.event import Event

MAX_UNREAD_EVENTS = 100_000


def deadline_after(timeout_s: float | None) -> float:
    """The instant of ``time.monotonic()`` at which a wait of this length ends; None waits for ever.

    Raises:
        ConfigError: a negative timeout, or not a number.
    """
    if timeout_s is None:
        return math.inf
    if not timeout_s >= 0:  # NaN is not
        raise ConfigError(f"timeout={timeout_s}; it is a number of seconds, 0 or more")
    return time.monotonic() + timeout_s


class Bell:
    """Wakes the coroutine that made it. ``ring`` may be called from any thread, ``wait`` by the maker only."""

    __slots__ = ("_future", "_loop", "_thread_id", "rung")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._future: asyncio.Future[None] | None = None
        self.rung = False
        """Whether it rang since somebody last set this to False."""

    def ring(self) -> None:
        """Wakes the waiting coroutine, or the next ``wait`` if none is waiting. Harmless when its loop is gone."""
        if self.rung:  # it was woken for the ring before, and looks at everything
            return
        self.rung = True
        try:
            if threading.get_ident() == self._thread_id:
                self._wake()
            else:
                self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # its loop is closed: nobody waits there any more
            return

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, deadline: float = math.inf) -> bool:
        """Waits until it rings or ``time.monotonic()`` reaches ``deadline``; returns whether it rang."""
        while not self.rung:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            self._future = self._loop.create_future()
            timer = None if remaining_s == math.inf else self._loop.call_later(min(remaining_s, 86_400), self._wake)
            try:
                await self._future
            finally:
                self._future = None
                if timer is not None:
                    timer.cancel()
        return True


class Countdown(Bell):
    """Rings when every rollout it was given has finished."""

    __slots__ = ("pending",)

    def __init__(self, rollout_ids: Iterable[str]) -> None:
        super().__init__()
        self.pending = set(rollout_ids)


class Subscription(Bell):
    """The unread events of one subscriber, in commit order."""

    __slots__ = ("kinds", "overflown", "run_id", "unread")

    def __init__(self, run_id: str, kinds: Collection[str] | None) -> None:
        super().__init__()
        self.run_id = run_id
        self.kinds = kinds
        self.unread: deque[Event] = deque()
        self.overflown = False

    def put(self, event: Event) -> None:
        if event.run_id != self.run_id or (self.kinds is not None and event.kind not in self.kinds):
            return
        if len(self.unread) >= MAX_UNREAD_EVENTS:
            self.overflown = True
        else:
            self.unread.append(event)
        self.ring()

    def take(self) -> Event:
        """Removes the oldest unread event.

        Raises:
            StoreError: events were lost because the subscriber does not keep up.
        """
        if not self.unread and self.overflown:
            raise StoreError(
                f"this subscriber left more than {MAX_UNREAD_EVENTS} events unread and has lost some; "
                "read them faster, or subscribe to fewer kinds"
            )
        return self.unread.popleft()


class Waiters:
    """Everybody who waits for something in one database. Safe to use from any thread and loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, OrderedDict[Bell, None]] = {}
        self._finishes: dict[str, dict[Countdown, None]] = {}
        self._subscriptions: dict[Subscription, None] = {}
        self.closed = False

    def publish(self, events: Sequence[Event]) -> None:
        """Wakes whom the events are for; a backend's listener."""
        ringing: list[Bell] = []
        with self._lock:
            for event in events:
                if event.kind == "rollout_finished":
                    for countdown in self._finishes.pop(event.rollout_id, ()):
                        countdown.pending.discard(event.rollout_id)
                        if not countdown.pending:
                            ringing.append(countdown)
                elif event.kind == "rollout_enqueued" and (bell := self._pop_queue(event.run_id)):
                    ringing.append(bell)
                for subscription in self._subscriptions:
                    subscription.put(event)
        for bell in ringing:
            bell.ring()

    def join_queue(self, run_id: str) -> Bell:
        """A bell that rings when a rollout of the run may be there to be claimed; each rollout rings one bell.

        Whoever joins must ``leave_queue`` in the end: a ring that was not used goes to the next in line.
        """
        bell = Bell()
        with self._lock:
            self._queues.setdefault(run_id, OrderedDict())[bell] = None
        return bell

    def rejoin_queue(self, run_id: str, bell: Bell) -> None:
        """Stands at the head of the line again, before trying to claim after a ring."""
        with self._lock:
            bell.rung = False
            line = self._queues.setdefault(run_id, OrderedDict())
            line[bell] = None
            line.move_to_end(bell, last=False)

    def leave_queue(self, run_id: str, bell: Bell) -> None:
        """Stops waiting."""
        heir: Bell | None = None
        with self._lock:
            line = self._queues.get(run_id)
            if line is not None:
                line.pop(bell, None)
                if not line:
                    del self._queues[run_id]
            if bell.rung:
                heir = self._pop_queue(run_id)
        if heir is not None:
            heir.ring()

    def expect(self, countdown: Countdown) -> None:
        """Begins to count the ends of its rollouts."""
        with self._lock:
            for rollout_id in countdown.pending:
                self._finishes.setdefault(rollout_id, {})[countdown] = None

    def settle(self, countdown: Countdown, rollout_ids: Iterable[str]) -> None:
        """Tells a countdown of rollouts that it need not wait for: they finished before it began, or it gives up."""
        with self._lock:
            for rollout_id in tuple(rollout_ids):
                countdown.pending.discard(rollout_id)
                waiting = self._finishes.get(rollout_id)
                if waiting is not None:
                    waiting.pop(countdown, None)
                    if not waiting:
                        del self._finishes[rollout_id]

    def subscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions[subscription] = None

    def unsubscribe(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions.pop(subscription, None)

    def close(self) -> None:
        """Wakes everybody for the last time; from now on nobody needs to wait."""
        with self._lock:
            self.closed = True
            everybody: list[Bell] = [bell for line in self._queues.values() for bell in line]
            everybody += [countdown for waiting in self._finishes.values() for countdown in waiting]
            everybody += self._subscriptions
        for bell in everybody:
            bell.ring()

    def _pop_queue(self, run_id: str) -> Bell | None:
        line = self._queues.get(run_id)
        if not line:
            return None
        bell, _ = line.popitem(last=False)
        if not line:
            del self._queues[run_id]
        return bell
