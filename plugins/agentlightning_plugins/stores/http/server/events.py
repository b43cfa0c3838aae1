"""Server-sent events: one numbered stream for each run, with any number of readers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from aiohttp import web
from pydantic_core import to_json

from agentlightning.event import EVENT_KINDS, Event
from agentlightning.store.check import check_choice
from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID

logger = logging.getLogger("agentlightning")

MAX_UNREAD_EVENTS: Final = 10_000
"""A reader with more unread events gets an event ``overflow``, and its stream ends."""
KEPT_EVENTS: Final = 4096
"""The number of events of a run that can be replayed."""
KEEPALIVE_S: Final = 4.0
_STUCK_S: Final = 60.0
"""The time after which a reader that reads no data is disconnected."""
_DRAIN_S: Final = 0.5
"""The time a reader has for its remaining events when the server stops."""
_LINGER_S: Final = 60.0
"""The time that events are kept after the last reader has disconnected, in case it reconnects."""
_HEADERS: Final = {
    "content-type": "text/event-stream",
    "cache-control": "no-store, no-transform",
    "x-accel-buffering": "no",  # nginx passes events on immediately
}


class EventStreams:
    """The event streams of all runs. Call all methods in the event loop of the server."""

    def __init__(self, view: Callable[[str], LightningStore]) -> None:
        """Creates the streams; the events of a run are subscribed to when its first reader joins.

        Args:
            view: returns the store as seen from a run.
        """
        self._view = view
        self.on_event: Callable[[Event], None] = lambda event: None
        """Called with each event before it is delivered."""
        self._hubs: dict[str | None, _Hub] = {}
        """The hub of each run that has readers; None is the key of the hub of all runs."""
        self._open: dict[asyncio.Future[None], tuple[web.Request, _Reader]] = {}
        """The requests that are being answered, by the future that is set when the answer ends."""
        self._stopped = False

    @property
    def subscribers(self) -> int:
        """The number of readers."""
        return sum(len(hub.readers) for hub in self._hubs.values())

    async def answer(
        self,
        request: web.Request,
        run_id: str | None,
        kinds: Sequence[str] | None,
        last_event_id: str | None,
        poll_s: float | None = None,
    ) -> web.StreamResponse:
        """Answers with the events of a run: ``id`` is the event's id, ``event`` the kind, ``data`` the event as JSON.

        The headers are sent after subscribing, so a client that has received them gets every later event. A client that
        sends the id of its last event gets the events since then, or an event ``gap`` if they are no longer kept. A
        reader that is too slow gets an event ``overflow``, and its stream ends.

        Args:
            request: the request.
            run_id: the run; None for all runs.
            kinds: the kinds of events that are sent; None sends all.
            last_event_id: the id of the client's last event.
            poll_s: ends the answer after the first events, or after this time without events; for clients behind a
                proxy that passes answers on only when they are complete. Without ``last_event_id``, the answer ends
                immediately, with the id to continue from.

        Raises:
            ConfigError: an unknown kind.
        """
        for kind in kinds or ():
            check_choice("kinds", kind, EVENT_KINDS)
        hub = self._hubs.get(run_id)
        if hub is None or hub.ended:
            self._hubs = {known: hub for known, hub in self._hubs.items() if not hub.ended}
            events = self._view(run_id or DEFAULT_RUN_ID).subscribe(every_run=run_id is None)
            hub = self._hubs[run_id] = _Hub(events, self)
        reader = _Reader(None if kinds is None else frozenset(kinds))
        begin = "" if last_event_id else f"\nid: {hub.position}"
        hub.join(reader, last_event_id)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[done] = request, reader
        if self._stopped:
            reader.end()
        try:
            await asyncio.sleep(0)  # a new hub subscribes in its first step
            response = web.StreamResponse(headers=_HEADERS)
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # the client has disconnected
                await response.write(f": subscribed{begin}\n\n".encode())
                if poll_s is not None:
                    await reader.wait(poll_s if last_event_id else 0.0)
                    await response.write(reader.take())
                else:
                    await _send_events(reader, response)
            return response
        finally:
            hub.leave(reader)
            del self._open[done]
            done.set_result(None)

    def end_unless(self, is_admitted: Callable[[web.Request], bool]) -> None:
        """Ends the streams whose requests are no longer admitted."""
        for request, reader in self._open.values():
            if not is_admitted(request):
                reader.end()

    async def stop(self) -> None:
        """Ends all streams and refuses new ones; readers that do not take their remaining events are disconnected."""
        self._stopped = True
        hubs, self._hubs = list(self._hubs.values()), {}
        for hub in hubs:
            await hub.stop()
        if self._open:
            _, stuck = await asyncio.wait(self._open, timeout=_DRAIN_S)
            for transport in [self._open[done][0].transport for done in stuck]:
                if transport is not None:
                    transport.abort()


async def _send_events(reader: _Reader, response: web.StreamResponse) -> None:
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
            if not await reader.wait(KEEPALIVE_S):
                await response.write(b": keep-alive\n\n")


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
                f"more than {MAX_UNREAD_EVENTS} events are unread, and later ones are lost; read faster or fewer kinds"
            )
            self._unread.append(_frame("overflow", to_json({"code": "overflow", "message": message})))
            self.ended = True
        else:
            self._unread.append(frame)
        self.changed.set()

    def put_gap(self, frame: bytes) -> None:
        self._unread.append(frame)
        self.changed.set()

    def end(self) -> None:
        self.ended = True
        self.changed.set()

    async def wait(self, timeout_s: float) -> bool:
        """Waits for events or the end of the stream; returns False if neither comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> bytes:
        self.changed.clear()
        if self.ended:
            self.changed.set()  # there will be no more
        frames = b"".join(self._unread)
        self._unread.clear()
        return frames


class _Hub:
    """Numbers the events of one run, keeps the latest of them, and hands them to the readers."""

    def __init__(self, events: AsyncIterator[Event], streams: EventStreams) -> None:
        self._streams = streams
        self.readers: set[_Reader] = set()
        self.ended = False
        self._name = os.urandom(4).hex()
        """Distinguishes the ids of these events from ids of another server or an earlier process."""
        self._number = 0
        self._kept: deque[tuple[str, bytes]] = deque(maxlen=KEPT_EVENTS)
        self._events = events
        self._task = asyncio.get_running_loop().create_task(self._pump())
        self._end_timer: asyncio.TimerHandle | None = None

    @property
    def position(self) -> str:
        """The id of the last event."""
        return f"{self._name}-{self._number}"

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
                message = "the events since that id are no longer known; read the store instead"
                reader.put_gap(_frame("gap", to_json({"code": "gap", "message": message})))
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
        try:
            async for event in self._events:
                self._publish(event)
        except Exception:  # isolation point: the headers are sent, so the streams can only end
            logger.exception("an event stream failed")
        finally:
            self.ended = True
            self._kept.clear()
            for reader in self.readers:
                reader.end()
            close = getattr(self._events, "aclose", None)  # generators have it, iterators need not
            if close is not None:
                await close()

    def _publish(self, event: Event) -> None:
        self._streams.on_event(event)
        self._number += 1
        frame = _frame(event.kind, to_json(event), self.position)
        self._kept.append((event.kind, frame))
        for reader in self.readers:
            reader.put(event.kind, frame)


def _frame(kind: str, data: bytes, event_id: str | None = None) -> bytes:
    head = f"id: {event_id}\nevent: {kind}" if event_id is not None else f"event: {kind}"
    return head.encode() + b"\ndata: " + data + b"\n\n"
