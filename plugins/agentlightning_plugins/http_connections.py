"""Connection limits: clients that have not shown a token cannot exhaust the server's file descriptors."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Final, cast

logger = logging.getLogger("agentlightning")

FIRST_BYTE_S: Final = 5.0
"""How long a new connection may send nothing."""
FIRST_REQUEST_S: Final = 10.0
"""How long the first request that is admitted may take to arrive."""
MAX_UNKNOWN: Final = 512
"""Maximum number of connections without an admitted request."""
MAX_UNKNOWN_OF_CLIENT: Final = 256
"""Maximum number of connections from one address without an admitted request."""
GRACE_S: Final = 1.0
"""Younger connections are closed only if file descriptors run out: many clients may connect at the same time."""
_RESERVED_FILES: Final = 128
"""Number of file descriptors reserved for the database and other files."""


class Connections:
    """Hands new connections to the HTTP server once they send data, and closes the oldest if there are too many.

    A connection is unknown until a request on it is admitted. If one client, or all clients together, have too many
    unknown connections, the oldest one is closed. Call the methods in an event loop that only the server uses.
    """

    def __init__(self, make_handler: Callable[[], asyncio.Protocol] | None) -> None:
        """Reads this process's limit of open files.

        Args:
            make_handler: makes the HTTP protocol of a connection, such as ``aiohttp.web.Server``.
        """
        assert make_handler is not None  # an aiohttp runner has no server before its setup
        self._make_handler = make_handler
        self._listener: asyncio.Server | None = None
        self._is_closed = False
        self._unknown: dict[asyncio.BaseTransport, _Arrival] = {}
        self._admitted: set[asyncio.BaseTransport] = set()
        self._most = max(_RESERVED_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_FILES)
        self._tidy_at = _RESERVED_FILES
        self._log = _SlowLog()

    async def listen(self, host: str, port: int, *, backlog: int = 128) -> tuple[str, int]:
        """Accepts connections from now on and returns the bound address; raises OSError if it is not available."""
        loop = asyncio.get_running_loop()
        _report_accept_errors(loop)
        # Given a host and a port, asyncio creates the sockets itself and disables Nagle's algorithm.
        self._listener = await loop.create_server(lambda: _Arrival(self), host, port, backlog=backlog)
        address, bound, *_ = self._listener.sockets[0].getsockname()
        return address, bound

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Marks the connection of an admitted request as known."""
        arrival = None if transport is None else self._unknown.pop(transport, None)
        if arrival is not None and transport is not None:
            arrival.timer.cancel()
            self._admitted.add(transport)
            if len(self._admitted) >= self._tidy_at:
                self._forget_closed()

    def enter(self, transport: asyncio.Transport, arrival: _Arrival) -> None:
        """Registers a new connection, and closes one if there are too many."""
        if self._is_closed:  # it was accepted just before the listener closed
            self.expire(transport)
            return
        address = arrival.address
        if len(self._unknown) + len(self._admitted) >= self._most:
            self._forget_closed()
            if len(self._unknown) + len(self._admitted) >= self._most:
                self.expire(next(iter(self._unknown), transport))
                self._log.warning(
                    "all %d connections are in use; raise the limit of open files (ulimit -n)", self._most
                )
        theirs = [other for other, known in self._unknown.items() if known.address == address]
        if len(theirs) >= MAX_UNKNOWN_OF_CLIENT or len(self._unknown) >= MAX_UNKNOWN:
            oldest = theirs[0] if len(theirs) >= MAX_UNKNOWN_OF_CLIENT else next(iter(self._unknown))
            if self._unknown[oldest].since < time.monotonic() - GRACE_S:
                self.expire(oldest)
                self._log.warning("%s has many connections without a valid request; the oldest are closed", address)
        if not transport.is_closing():
            self._unknown[transport] = arrival

    def leave(self, transport: asyncio.Transport) -> None:
        """Removes a connection that was closed before it sent anything."""
        self._unknown.pop(transport, None)

    def start_handler(self, transport: asyncio.Transport, data: bytes) -> None:
        """Hands a connection to the HTTP server with the first bytes that it has sent."""
        handler = self._make_handler()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(data)

    def expire(self, transport: Any) -> None:
        """Closes an unknown connection immediately."""
        self._unknown.pop(transport, None)
        transport.abort()

    def are_open(self) -> bool:
        """Returns whether a client is connected that has sent something."""
        self._forget_closed()
        return bool(self._admitted or self._unknown)

    def _forget_closed(self) -> None:
        self._admitted = {transport for transport in self._admitted if not transport.is_closing()}
        self._tidy_at = max(_RESERVED_FILES, 2 * len(self._admitted))
        self._unknown = {transport: known for transport, known in self._unknown.items() if not transport.is_closing()}

    async def close(self) -> None:
        """Stops listening and closes the connections that have sent nothing; the HTTP server closes the others."""
        self._is_closed = True
        if self._listener is not None:
            for listening in self._listener.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):  # asyncio leaks a connection that it hands over after the listener is closed
                await asyncio.sleep(0)
            self._listener.close()
        for transport, arrival in list(self._unknown.items()):
            arrival.timer.cancel()
            if not arrival.has_sent:
                self.expire(transport)


class _Arrival(asyncio.Protocol):
    """A connection that has sent nothing yet."""

    timer: asyncio.TimerHandle
    transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.address = ""
        self.has_sent = False
        self.since = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not instances of it
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self._limit(FIRST_BYTE_S)
        self._connections.enter(self.transport, self)

    def data_received(self, data: bytes) -> None:
        self.has_sent = True
        self.timer.cancel()
        self._limit(FIRST_REQUEST_S)
        self._connections.start_handler(self.transport, data)

    def connection_lost(self, error: Exception | None) -> None:
        self.timer.cancel()
        self._connections.leave(self.transport)

    def _limit(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(seconds, self._connections.expire, self.transport)


class _SlowLog:
    """Logs at most one message per second, with the number of messages that were suppressed since the last one."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def warning(self, message: str, *arguments: object) -> None:
        """Logs a message, or counts it as suppressed."""
        if time.monotonic() < self._next:
            self._left_out += 1
            return
        logger.warning("%s (%d similar messages since the last one)", message % arguments, self._left_out)
        self._next, self._left_out = time.monotonic() + 1.0, 0


def _report_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Makes a loop log accept errors once per second, instead of once for each connection in the backlog."""
    slowly = _SlowLog()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context["message"]:
            slowly.warning("no connection can be accepted: %s; raise the limit of open files (ulimit -n)", error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
