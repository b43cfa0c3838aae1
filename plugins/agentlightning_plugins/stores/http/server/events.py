"""Server-sent events: one numbered stream for each run, which any number of readers follow at their own pace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web
from pydantic_core import to_json

from agentlightning.event import EVENT_KINDS, Event
from agentlightning.store.filter import check_choice
from agentlightning.store.protocol import LightningStore

logger = logging.getLogger("agentlightning")

MAX_UNREAD_EVENTS: Final = 10_000
"""A reader that is further behind is told so, and its stream ends."""
KEPT_EVENTS: Final = 4096
"""How many events of a run can be replayed."""
KEEPALIVE_S: Final = 15.0
_STUCK_S: Final = 60.0
"""How long a reader may take in nothing at all."""
_PARTING_S: Final = 0.5
"""How long a reader has for the rest of its events when the server stops."""
_LINGER_S: Final = 60.0
"""How long events are kept for a reader that may come back, when there is no other."""


class EventStreams:
    """The streams of all runs. Everything belongs to the event loop of the server."""

    def __init__(self, view: Callable[[str], LightningStore]) -> None:
        """Follows nothing yet.

        Args:
            view: the store as seen from a run.
        """
        self._view = view
        self._hubs: dict[str, _Hub] = {}
        self._open: dict[asyncio.Future[None], web.Request] = {}
        """The requests that are being answered, by what tells their end."""
        self._stopped = False

    @property
    def subscribers(self) -> int:
        """How many readers there are."""
        return sum(len(hub.readers) for hub in self._hubs.values())

    async def answer(
        self, request: web.Request, run_id: str, kinds: Sequence[str] | None, last_event_id: str | None
    ) -> web.StreamResponse:
        """Answers with the events of a run: ``id`` is the number, ``event`` the kind, ``data`` the event as JSON.

        The headers are sent when the subscription stands, so a client that has them misses nothing that happens
        afterwards. With the id of the last event that it saw, it gets those that came since, or an event ``gap`` where
        they are not known any more. A reader that is too slow gets an event ``overflow`` and the end of the stream.

        Raises:
            ConfigError: an unknown kind.
        """
        for kind in kinds or ():
            check_choice("kinds", kind, EVENT_KINDS)
        hub = self._hubs.get(run_id)
        if hub is None or hub.ended:
            self._hubs = {known: hub for known, hub in self._hubs.items() if not hub.ended}
            hub = self._hubs[run_id] = _Hub(self._view(run_id))
        reader = _Reader(None if kinds is None else frozenset(kinds))
        hub.join(reader, last_event_id)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[over] = request
        if self._stopped:
            reader.end()
        try:
            await asyncio.sleep(0)  # a new hub takes its first step, which subscribes
            response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # the client has left
                await response.write(b": subscribed\n\n")
                await _copy(reader, response)
            return response
        finally:
            hub.leave(reader)
            del self._open[over]
            over.set_result(None)

    async def stop(self) -> None:
        """Ends all streams, now and from now on; a reader that does not take in the rest at once is cut off."""
        self._stopped = True
        hubs, self._hubs = list(self._hubs.values()), {}
        for hub in hubs:
            await hub.stop()
        if self._open:
            _, stuck = await asyncio.wait(self._open, timeout=_PARTING_S)
            for transport in [self._open[over].transport for over in stuck]:
                if transport is not None:
                    transport.abort()


async def _copy(reader: _Reader, response: web.StreamResponse) -> None:
    while True:
        frames = reader.take()
        if frames:
            try:
                async with asyncio.timeout(_STUCK_S):
                    await response.write(frames)
            except TimeoutError:
                response.force_close()
                return
        elif reader.ended:
            return
        else:
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    await reader.changed.wait()
            except TimeoutError:
                await response.write(b": still here\n\n")


class _Reader:
    """The unread events of one client, as bytes."""

    def __init__(self, kinds: frozenset[str] | None) -> None:
        self.changed = asyncio.Event()
        self.ended = False
        self._kinds = kinds
        self._unread: deque[bytes] = deque()

    def put(self, kind: str, frame: bytes) -> None:
        if self.ended or (self._kinds is not None and kind not in self._kinds):
            return
        if len(self._unread) >= MAX_UNREAD_EVENTS:
            message = (
                f"more than {MAX_UNREAD_EVENTS} events were unread and the rest is lost; read faster, or fewer kinds"
            )
            self._unread.append(_frame("overflow", to_json({"code": "overflow", "message": message})))
            self.ended = True
        else:
            self._unread.append(frame)
        self.changed.set()

    def tell(self, frame: bytes) -> None:
        self._unread.append(frame)
        self.changed.set()

    def end(self) -> None:
        self.ended = True
        self.changed.set()

    def take(self) -> bytes:
        self.changed.clear()
        if self.ended:
            self.changed.set()  # nothing more will come: there is no need to wait
        frames = b"".join(self._unread)
        self._unread.clear()
        return frames


class _Hub:
    """Numbers the events of one run, keeps the last of them, and hands them to the readers."""

    def __init__(self, store: LightningStore) -> None:
        self.readers: set[_Reader] = set()
        self.ended = False
        self._name = os.urandom(4).hex()
        """Tells our ids from those of an earlier or another server, whose numbers mean something else."""
        self._number = 0
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=KEPT_EVENTS)
        self._store = store
        self._task = asyncio.get_running_loop().create_task(self._pump())
        self._end_timer: asyncio.TimerHandle | None = None

    def join(self, reader: _Reader, last_event_id: str | None) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
            self._end_timer = None
        if last_event_id:
            name, _, number = last_event_id.partition("-")
            missed = self._number - int(number) if name == self._name and number.isdecimal() else None
            if missed is not None and 0 <= missed <= len(self._kept):
                for kind, frame in list(self._kept)[len(self._kept) - missed :]:
                    reader.put(kind, frame)
            else:
                message = "what happened since that id is not known here; read the store for it"
                reader.tell(_frame("gap", to_json({"code": "gap", "message": message})))
        self.readers.add(reader)

    def leave(self, reader: _Reader) -> None:
        self.readers.discard(reader)
        if not self.readers and not self.ended:
            self._end_timer = asyncio.get_running_loop().call_later(_LINGER_S, self._task.cancel)

    async def stop(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _pump(self) -> None:
        events = self._store.subscribe()
        try:
            async for event in events:
                self._publish(event)
        except Exception:  # isolation point: the readers have their headers, so all we can do is end their streams
            logger.exception("the stream of events of run %r broke off", self._store.run_id)
        finally:
            self.ended = True
            self._kept.clear()
            for reader in self.readers:
                reader.end()
            close = getattr(events, "aclose", None)  # a generator has it, an iterator need not
            if close is not None:
                await close()

    def _publish(self, event: Event) -> None:
        self._number += 1
        frame = _frame(event.kind, to_json(event), f"{self._name}-{self._number}")
        self._kept.append((event.kind, frame))
        for reader in self.readers:
            reader.put(event.kind, frame)


def _frame(kind: str, data: bytes, event_id: str | None = None) -> bytes:
    head = f"id: {event_id}\nevent: {kind}" if event_id is not None else f"event: {kind}"
    return head.encode() + b"\ndata: " + data + b"\n\n"
