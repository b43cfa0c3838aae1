from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.loop_thread import LoopThread
from agentlightning_plugins.shared.token import check_token
from agentlightning_plugins.shared.web.request import is_loopback
from agentlightning_plugins.stores.http.server.application import OTLP_PATH, Pages, StoreApplication


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
        self._thread: LoopThread | None = None

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
            if self._thread is not None:
                self._thread.submit(self._served.end_refused_streams())

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
        self._thread = LoopThread("agl-store-server")
        served = self._served = StoreApplication(self._store, self._tokens, self._pages)
        try:
            self.port = await asyncio.wrap_future(self._thread.submit(served.server.start(self.host, self.port)))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops listening, ends waiting requests with their results so far, and finishes the rest. Can be repeated."""
        thread, self._thread = self._thread, None
        served, self._served = self._served, None
        if thread is not None and served is not None:
            await asyncio.to_thread(_stop, thread, served)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


def _stop(thread: LoopThread, served: StoreApplication) -> None:
    try:
        thread.submit(served.stop()).result()
    finally:
        thread.close()
        served.forget()
