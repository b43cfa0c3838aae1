"""The server that serves the store, the gateway, the dashboard, the policy server and agents of 0.1."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from agentlightning.errors import ConfigError
from agentlightning_plugins.shared.web.connections import ConnectionLimits

KEEPALIVE_S: Final = 75.0
"""How long a connection may be idle: longer than clients keep one, so that the client closes it."""
_ARRIVAL_S: Final = 0.1
"""How long a request that was sent before the server stops may take to arrive."""
_LINGER_S: Final = 1.0
"""Time that a client has to read the answer while it is still sending a body that the server does not read."""
BaseHandler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class WebServer:
    """Serves an application with limits on connections, and stops gracefully.

    Handlers read bodies with ``read_body`` and call ``admit`` for each request of a client that may send requests: as
    long as no request on a connection is admitted, it may be closed in favour of new ones.
    """

    def __init__(self, serves: web.Application | BaseHandler, *, finish_s: float) -> None:
        """Creates a server.

        Args:
            serves: an application that has not been started, or a handler of all requests.
            finish_s: how long requests in flight may take to end when the server stops.
        """
        self._serves = serves
        self._finish_s = finish_s
        self._runner: web.BaseRunner | None = None
        self._connections: ConnectionLimits | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self.is_stopping = False
        """Whether ``stop_listening`` or ``stop`` was called."""
        if isinstance(serves, web.Application):
            serves.middlewares.insert(0, self._watch)

    async def start(self, host: str, port: int, *, backlog: int = 128) -> int:
        """Starts to listen and returns the port.

        Raises:
            ConfigError: the address is not available.
        """
        settings: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,  # ``read_body`` inflates: in a thread, and only what its caller allows
            "handler_cancellation": True,  # a handler ends when its client disconnects
            "keepalive_timeout": KEEPALIVE_S,
            "lingering_time": 0.02,  # after a refusal: lets a client read the answer before a reset
            "logger": RequestLog(),
        }
        if isinstance(self._serves, web.Application):
            self._runner = web.AppRunner(self._serves, shutdown_timeout=self._finish_s, **settings)
        else:
            self._runner = web.ServerRunner(web.Server(self._serves, **settings), shutdown_timeout=self._finish_s)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = ConnectionLimits(self._runner.server)
        try:
            return await self._connections.listen(host, port, backlog=backlog)
        except OSError as error:
            await self.stop()
            where = f"port {port} of {host}"
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{where} is in use; choose another port, or 0 for a free one") from None
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error

    def admit(self, request: web.BaseRequest) -> None:
        """Keeps the connection of a request, whose client may send requests."""
        if self._connections is not None:
            self._connections.admit(request.transport)

    async def stop_listening(self) -> None:
        """Accepts no further connections. Requests still arrive on open ones, and close them."""
        self.is_stopping = True
        if self._connections is not None:
            await self._connections.close()

    async def stop(self) -> None:
        """Stops listening, waits for the requests in flight, and closes all connections.

        aiohttp also waits for handlers, but does not read meanwhile, so a request whose body is still arriving is lost.
        """
        await self.stop_listening()
        runner, self._runner = self._runner, None
        if runner is None:
            return
        timer = asyncio.get_running_loop().call_later(self._finish_s, _abort_connections, runner)
        if isinstance(self._serves, web.Application) and runner.server is not None and runner.server.connections:
            await asyncio.sleep(_ARRIVAL_S)
            if self._in_flight:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._finish_s):
                        await self._idle.wait()
        await runner.cleanup()
        timer.cancel()

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts the requests in flight, and closes connections whose request is not read to its end."""
        self._in_flight += 1
        try:
            response = await handler(request)
        finally:
            self._in_flight -= 1
            if self.is_stopping and not self._in_flight:
                self._idle.set()
        if self.is_stopping:
            response.force_close()
        if not request.content.is_eof() and not response.prepared:
            await _close_after(request, response)
        return response


class RequestLog(logging.Logger):
    """The logger for aiohttp, which drops two kinds of records.

    It drops records about requests that cannot be parsed, whose text may contain a key, and about disconnections.
    """

    def __init__(self) -> None:
        super().__init__("agentlightning.http", logging.WARNING)
        self.parent = logging.getLogger("agentlightning")

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (HttpProcessingError, ConnectionResetError)):
            super().handle(record)


async def answer_expect(request: web.Request) -> None:
    """The ``expect_handler`` of routes: unlike aiohttp's, it survives a header that is not UTF-8."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="only 'Expect: 100-continue' is supported")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the head of the answer is not sent yet


def stop_on_signals() -> asyncio.Event:
    """Returns an event that SIGINT or SIGTERM sets; a second signal ends the process immediately."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = signal.SIGINT, signal.SIGTERM

    def handle() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, handle)
    return stop


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    """Answers a request whose body is not read to its end; the connection is closed a moment later.

    If it were closed immediately, a client that is still sending would lose the answer.
    """
    response.force_close()
    await response.prepare(request)
    await response.write_eof()
    await asyncio.sleep(_LINGER_S)


def _abort_connections(runner: web.BaseRunner) -> None:
    """Closes the remaining connections, whose clients have stopped sending or reading."""
    for connection in [] if runner.server is None else runner.server.connections:
        if connection.transport is not None:
            connection.transport.abort()
