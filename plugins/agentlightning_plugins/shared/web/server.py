"""The server that serves the store, the gateway, the dashboard, the policy server and agents of 0.1."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import os
import resource
import signal
import termios
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from opentelemetry.trace import NoOpTracer, SpanKind, Tracer

from agentlightning.errors import ConfigError, install_command
from agentlightning_plugins.shared.log_setup import REQUEST_ID_HEADER, begin_request

logger = logging.getLogger("agentlightning")
MAX_UNKNOWN: Final = 512
"""Maximum number of connections without an admitted request, if the limit of open files allows it."""
GRACE_S: Final = 1.0
"""Younger connections are closed only if file descriptors run out: many clients may connect at the same time."""
_HANDLER_TURNS: Final = 4
"""Turns of the event loop from reading a request to the start of its handler."""
_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\nContent-Length: 26\r\n"
    b"Connection: close\r\n\r\nall connections are in use"
)
_LEAST_FILES: Final = 64
_RESERVED_FILES: Final = 128
"""Number of file descriptors reserved for the database and other files."""


class ConnectionLimits:
    """Closes the oldest connections without an admitted request, if there are too many; answers 503 if all are in use.

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
        self._unknown: dict[asyncio.BaseTransport, float] = {}
        """For each connection without an admitted request, the time at which it was opened."""
        self._closing: set[asyncio.BaseTransport] = set()
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
        if transport is not None and (transport in self._unknown or transport in self._closing):
            self._unknown.pop(transport, None)
            self._closing.discard(transport)
            self._admitted.add(transport)
            if len(self._admitted) >= self._tidy_at:
                self._forget_closed()

    def enter(self, transport: asyncio.Transport) -> None:
        """Registers a new connection and hands it to the HTTP server; closes or refuses one if there are too many."""
        if self._is_closed:  # it was accepted just before the listener closed
            transport.abort()
            return
        if len(self._unknown) >= MAX_UNKNOWN or self._is_full():
            self._forget_closed()
        if self._is_full() and not self._close_silent(older_than_s=0.0):
            transport.set_protocol(_Refusal(transport))
            self._warn("all %d connections are in use; raise the limit of open files (ulimit -n)", self._most)
            return
        if len(self._unknown) >= MAX_UNKNOWN and self._close_silent(older_than_s=GRACE_S):
            self._warn("there are many connections without a valid request; the oldest are closed")
        handler = self._make_handler()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        self._unknown[transport] = time.monotonic()

    def _is_full(self) -> bool:
        return len(self._unknown) + len(self._admitted) >= self._most

    def _close_silent(self, *, older_than_s: float) -> bool:
        """Closes the oldest unknown connection whose client has sent nothing that is still to be read, if any.

        On a busy server, the request of a client may wait for longer than any time limit.
        """
        opened_before = time.monotonic() - older_than_s
        for transport, opened_at in self._unknown.items():
            if opened_at > opened_before:
                break
            if not _has_unread(transport):
                del self._unknown[transport]
                self._closing.add(transport)
                self._close_soon(transport)
                return True
        return False

    def _close_soon(self, transport: Any, turns: int = _HANDLER_TURNS) -> None:
        """Closes a connection, unless a request that was read just now is admitted first."""
        if turns:
            asyncio.get_running_loop().call_soon(self._close_soon, transport, turns - 1)
        elif transport in self._closing:
            self._closing.discard(transport)
            transport.abort()

    async def close(self) -> None:
        """Stops listening; the HTTP server closes the connections."""
        self._is_closed = True
        if self._listener is not None:
            for listening in self._listener.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):  # asyncio leaks a connection that it hands over after the listener is closed
                await asyncio.sleep(0)
            self._listener.close()

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


class _Refusal(asyncio.Protocol):
    """The protocol of a connection beyond the limit: answers its first request with 503 and closes it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_answered = False
        asyncio.get_running_loop().call_later(GRACE_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._transport.write(_BUSY)
            self._transport.write_eof()


def _has_unread(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes of the client wait in the socket."""
    size = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, size)
    return size[0] > 0


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
            resolve = serves.router.resolve

            async def resolve_with_expect(request: web.Request) -> web.UrlMappingMatchInfo:
                match = await resolve(request)
                match.route._expect_handler = _answer_expect  # also of the routes that answer 404 and 405
                return match

            serves.router.resolve = resolve_with_expect  # type: ignore[method-assign] # has no hook for it

    async def start(self, host: str, port: int, *, backlog: int = 128) -> int:
        """Starts to listen and returns the port; raises ConfigError if the address is not available."""
        _own_tracer()  # if it cannot be made, before a request arrives
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
            self._runner = web.ServerRunner(web.Server(self._identify, **settings), shutdown_timeout=self._finish_s)
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

        aiohttp also waits for handlers, but without reading, so it loses a request whose body is still arriving.
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

    async def _identify(self, request: web.BaseRequest) -> web.StreamResponse:
        return await _answer(request, cast(BaseHandler, self._serves))

    @web.middleware
    async def _watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts the requests in flight, and closes connections whose request is not read to its end."""
        self._in_flight += 1
        try:
            response = await _answer(request, handler)
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


async def _answer_expect(request: web.Request) -> None:
    """The ``expect_handler`` of all routes: unlike aiohttp's, it survives a header that is not UTF-8."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="only 'Expect: 100-continue' is supported")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the head of the answer is not sent yet


def raise_file_limit() -> None:
    """Raises the limit of open files, and so of connections, as far as the system allows without further rights.

    For processes that only serve; call it before ``WebServer.start``. Raises ConfigError if it stays too low.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS reports no limit, but refuses to set that
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < _LEAST_FILES:  # negative: no limit
        raise ConfigError(f"this process may open {limit} files, and a server needs {_LEAST_FILES}; raise ulimit -n")


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


async def _answer(request: Any, handler: Callable[[Any], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Answers a request with its id, which is also in the log, in the header X-Request-Id."""
    own_id = begin_request(request.headers.get(REQUEST_ID_HEADER))
    routed = request.match_info.route.resource if isinstance(request, web.Request) else None
    route = "" if routed is None else routed.canonical
    about = {"http.request.method": request.method, "http.route": route, "request_id": own_id}
    span = _own_tracer().start_span(f"{request.method} {route}".strip(), kind=SpanKind.SERVER, attributes=about)
    try:
        response = await handler(request)
        span.set_attribute("http.response.status_code", response.status)
    finally:
        span.end()
    if not response.prepared:
        response.headers.setdefault(REQUEST_ID_HEADER, own_id)
    return response


@functools.cache
def _own_tracer() -> Tracer:
    """Returns the tracer of this process's servers, which exports only with ``OTEL_TRACES_EXPORTER=otlp``.

    OpenTelemetry's other variables say how. Spans of agents have a provider of their own.
    """
    if os.environ.get("OTEL_TRACES_EXPORTER") != "otlp":
        return NoOpTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(f"OTEL_TRACES_EXPORTER=otlp needs an extra: {install_command('otlp')}") from None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("agentlightning")


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
