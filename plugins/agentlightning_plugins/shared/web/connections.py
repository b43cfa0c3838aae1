"""Connection limits: clients that have not shown a key cannot use up the server's file descriptors.

aiohttp closes a connection on which no request arrives within the keep-alive timeout, and limits the size of headers.
It does not limit the number of connections.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Final, cast

logger = logging.getLogger("agentlightning")

MAX_UNKNOWN: Final = 512
"""Maximum number of connections without an admitted request, if the limit of open files allows it."""
MAX_UNKNOWN_OF_CLIENT: Final = 256
"""Maximum number of connections from one address without an admitted request."""
GRACE_S: Final = 1.0
"""Younger connections are closed only if file descriptors run out: many clients may connect at the same time."""
_RESERVED_FILES: Final = 128
"""Number of file descriptors reserved for the database and other files."""


class ConnectionLimits:
    """Closes the oldest connections without an admitted request, if one client or all together have too many.

    Call the methods in an event loop that only the server uses.
    """

    def __init__(self, make_handler: Callable[[], asyncio.Protocol]) -> None:
        """Reads this process's limit of open files.

        Args:
            make_handler: makes the HTTP protocol of a connection, such as ``aiohttp.web.Server``.
        """
        self._make_handler = make_handler
        self._listener: asyncio.Server | None = None
        self._is_closed = False
        self._unknown: dict[asyncio.BaseTransport, tuple[str, float]] = {}
        """For each connection without an admitted request, its address and the time at which it was opened."""
        self._admitted: set[asyncio.BaseTransport] = set()
        self._most = max(_RESERVED_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_FILES)
        self._tidy_at = _RESERVED_FILES
        self._warns_at = 0.0

    async def listen(self, host: str, port: int, *, backlog: int = 128) -> int:
        """Accepts connections from now on and returns the port; raises OSError if the address is not available."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_error)
        # Given a host and a port, asyncio creates the sockets itself and disables Nagle's algorithm.
        self._listener = await loop.create_server(lambda: _NewConnection(self), host, port, backlog=backlog)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def admit(self, transport: asyncio.BaseTransport | None) -> None:
        """Marks the connection of an admitted request as known."""
        if transport is not None and self._unknown.pop(transport, None) is not None:
            self._admitted.add(transport)
            if len(self._admitted) >= self._tidy_at:
                self._forget_closed()

    def enter(self, transport: asyncio.Transport) -> None:
        """Registers a new connection and hands it to the HTTP server; closes one if there are too many."""
        if self._is_closed:  # it was accepted just before the listener closed
            transport.abort()
            return
        handler = self._make_handler()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        self._unknown[transport] = address, time.monotonic()
        if self._find_surplus(address) is None:
            return
        self._forget_closed()
        surplus = self._find_surplus(address)
        if surplus is not None and self._is_full():
            self._close(surplus)
            self._warn("all %d connections are in use; raise the limit of open files (ulimit -n)", self._most)
        elif surplus is not None and self._unknown[surplus][1] < time.monotonic() - GRACE_S:
            self._close(surplus)
            self._warn("%s has many connections without a valid request; the oldest are closed", address)

    def _is_full(self) -> bool:
        return len(self._unknown) + len(self._admitted) > self._most

    def _find_surplus(self, address: str) -> asyncio.BaseTransport | None:
        """Returns the oldest unknown connection if there are too many, of the address if these are too many."""
        theirs = [transport for transport, (known, _) in self._unknown.items() if known == address]
        if len(theirs) > MAX_UNKNOWN_OF_CLIENT:
            return theirs[0]
        return next(iter(self._unknown)) if len(self._unknown) > MAX_UNKNOWN or self._is_full() else None

    async def close(self) -> None:
        """Stops listening; the HTTP server closes the connections."""
        self._is_closed = True
        if self._listener is not None:
            for listening in self._listener.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):  # asyncio leaks a connection that it hands over after the listener is closed
                await asyncio.sleep(0)
            self._listener.close()

    def _close(self, transport: Any) -> None:
        del self._unknown[transport]
        transport.abort()

    def _forget_closed(self) -> None:
        self._admitted = {transport for transport in self._admitted if not transport.is_closing()}
        self._tidy_at = max(_RESERVED_FILES, 2 * len(self._admitted))
        self._unknown = {transport: since for transport, since in self._unknown.items() if not transport.is_closing()}

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs that connections cannot be accepted once per second, instead of once for each one in the backlog."""
        error = context.get("exception")
        if isinstance(error, OSError) and "accept" in context["message"]:
            self._warn("no connection can be accepted: %s; raise the limit of open files (ulimit -n)", error)
        else:
            loop.default_exception_handler(context)

    def _warn(self, message: str, *arguments: object) -> None:
        """Logs at most one message per second."""
        if time.monotonic() > self._warns_at:
            self._warns_at = time.monotonic() + 1.0
            logger.warning(message, *arguments)


class _NewConnection(asyncio.Protocol):
    """The protocol of a connection until it is registered."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._limits.enter(cast(asyncio.Transport, transport))  # uvloop's transports are not instances of it
