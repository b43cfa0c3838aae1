from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.http_connections import Connections
from agentlightning_plugins.http_request import SERVER_SETTINGS, RequestLog, is_loopback
from agentlightning_plugins.stores.http.server.application import OTLP_PATH, StoreApplication
from agentlightning_plugins.stores.http.server.pages import Pages
from agentlightning_plugins.stores.token import check_token

_FINISH_REQUESTS_S: Final = 6.0
_KEEPALIVE_S: Final = 75.0
"""Longer than clients keep idle connections, so that the client closes them."""


class LightningStoreServer:
    """Serves a store over HTTP from its own thread, so that runners do not stall if the caller's event loop is blocked.

    The caller still owns the store: it may use the store while the server runs, and closes it.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str = "127.0.0.1",
        port: int = 4747,
        *,
        token: str | Sequence[str] | None = None,
        pages: Sequence[Pages] = (),
    ) -> None:
        """Creates the server; ``start`` listens.

        Args:
            store: must be thread-safe. Requests choose their run by the header ``agl-run``.
            host: address to listen on. Anything but loopback needs a token.
            port: port to listen on; 0 takes a free one, which ``endpoint`` shows.
            token: the token that clients must send; None admits programs on this machine. If there are several,
                clients may send any, and the first signs attempt tokens: a token can be replaced without interruption.
            pages: pages that are served in addition to the API, such as the dashboard.

        Raises:
            ConfigError: a store that is not thread-safe, or an address other than loopback without a token.
        """
        if not store.capabilities["thread_safe"]:
            raise ConfigError(f"{type(store).__name__} is not thread-safe and cannot be served; use a store that is")
        tokens = (token,) if isinstance(token, str) else tuple(token or ())
        if not tokens and not is_loopback(host):
            raise ConfigError(
                f"host = {host!r} lets other machines in; set a token (--token or AGL_TOKEN), or listen on 127.0.0.1"
            )
        self.host = host
        self.port = port
        self._store = store
        self._pages = pages
        self._served: StoreApplication | None = None
        self.replace_tokens(tokens)
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], None] = lambda: None

    @property
    def endpoint(self) -> str:
        """The URL for clients on this machine; with port 0 it is known after ``start``."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 # not a bind
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Accepts these tokens from now on; the first signs attempt tokens.

        Raises:
            ConfigError: a token cannot be sent, or the server runs and no token is given; nothing has changed.
        """
        for token in tokens:
            check_token(token)
        if not tokens and self._served is not None:
            raise ConfigError("a running server keeps at least one token")
        self._tokens = tuple(tokens)
        if tokens:
            self._store.token = tokens[0]  # a gateway next to the server verifies attempt tokens with it
        if self._served is not None:
            self._served.replace_tokens(tokens)

    def otlp_traces_endpoint(self) -> str:
        """Returns the URL that takes OTLP/HTTP traces."""
        return self.endpoint + OTLP_PATH

    async def start(self) -> None:
        """Starts to listen; returns when requests are answered.

        Raises:
            ConfigError: the address is not available.
            ConflictError: the server has started already.
        """
        if self._thread is not None:
            raise ConflictError(f"the store server at {self.endpoint} has started already")
        loop, stopping = asyncio.new_event_loop(), asyncio.Event()
        listening: concurrent.futures.Future[int] = concurrent.futures.Future()

        def serve() -> None:
            listening.set_running_or_notify_cancel()  # the caller's task may be cancelled, but not this future
            try:
                with asyncio.Runner(loop_factory=lambda: loop) as runner:
                    runner.run(self._serve(listening, stopping))
            except BaseException as error:  # isolation point: ``start`` raises it
                if listening.done():
                    raise
                listening.set_exception(error)

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it could not listen
                loop.call_soon_threadsafe(stopping.set)

        self._stop = stop
        self._thread = threading.Thread(target=serve, name="agl-store-server", daemon=True)
        self._thread.start()
        try:
            self.port = await asyncio.wrap_future(listening)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops listening, ends waiting requests with their results so far, and finishes the rest. Can be repeated."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop()
            await asyncio.to_thread(thread.join)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _serve(self, listening: concurrent.futures.Future[int], stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        served = self._served = StoreApplication(self._store, self._tokens, self._pages)
        runner = web.AppRunner(
            served.application,
            access_log=None,
            logger=RequestLog(),
            **SERVER_SETTINGS,
            handler_cancellation=True,  # a waiting request ends when its client disconnects
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=_FINISH_REQUESTS_S,
        )
        await runner.setup()
        connections = served.connections = Connections(runner.server)
        try:
            listening.set_result((await connections.listen(self.host, self.port))[1])
            await stopping.wait()
        except OSError as error:
            listening.set_exception(self._cannot_listen(error))
        finally:
            await connections.close()
            abort_timer = loop.call_later(_FINISH_REQUESTS_S, _abort_connections, runner)
            await served.stop(_FINISH_REQUESTS_S)
            await runner.cleanup()
            abort_timer.cancel()
            self._served = None
            served.forget()

    def _cannot_listen(self, error: OSError) -> ConfigError:
        where = f"port {self.port} of {self.host}"
        if error.errno == errno.EADDRINUSE:
            return ConfigError(f"{where} is in use; choose another port, or 0 for a free one")
        return ConfigError(f"cannot listen on {where}: {error.strerror or error}")


def _abort_connections(runner: web.AppRunner) -> None:
    """Closes the remaining connections, whose clients have stopped sending or reading."""
    server = runner.server
    for connection in [] if server is None else server.connections:
        if connection.transport is not None:
            connection.transport.abort()
