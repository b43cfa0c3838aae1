"""Clients of ``openai`` that call one attempt's endpoint; they share TLS settings, so that one costs a millisecond."""

from __future__ import annotations

import contextlib
import functools
import importlib
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from agentlightning.resources import LLM
from agentlightning_integrations.framework.pickling import register_reducer


@contextlib.asynccontextmanager
async def async_client(llm: LLM) -> AsyncIterator[AsyncOpenAI]:
    """A client for one rollout, closed with it: connections belong to the event loop that opened them."""
    transport = DefaultAsyncHttpxClient(verify=_tls())
    async with AsyncOpenAI(
        base_url=llm.get_base_url(), api_key=llm.api_key or "unused", http_client=transport
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def optional_client(llm: LLM | None) -> AsyncIterator[AsyncOpenAI | None]:
    """As ``async_client``; None where the framework's object keeps its own."""
    if llm is None:
        yield None
        return
    async with async_client(llm) as client:
        yield client


@contextlib.contextmanager
def sync_client(llm: LLM) -> Iterator[OpenAI]:
    """As ``async_client``, for code that does not await; threads may share it, and their calls end with the block."""
    transport = _Stoppable(verify=_tls())
    try:
        yield OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused", http_client=transport)
    finally:
        transport.stop()


class _Stoppable(DefaultHttpxClient):
    """An HTTP client that can be stopped while other threads wait for answers.

    ``close`` alone closes what those threads wait on: they do not notice, and once the number of the file is given to
    somebody else, they wait for that. Hanging up ends their wait, and each closes what it has used.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_flight = 0
        self._is_stopped = False

    def send(self, request: Any, **settings: Any) -> Any:
        """Sends a request, unless the client was stopped."""
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the rollout of this client is over")
            self._in_flight += 1
        try:
            request.extensions = {**request.extensions, "trace": self._note}
            response = super().send(request, **settings)
            if settings.get("stream"):
                self._streams.add(response)
            return response
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1
        if self._is_stopped:
            self._close_if_idle()

    def stop(self) -> None:
        """Ends what is in flight, and forbids the rest."""
        with self._lock:
            self._is_stopped = True
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._in_flight and all(stream.is_closed for stream in list(self._streams)):
            self.close()

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by the transport at every step of a request; those that open a connection give it."""
        stream = info.get("return_value")
        if event.endswith(("connect_tcp.complete", "start_tls.complete")) and stream is not None:
            self._sockets.add(stream.get_extra_info("socket"))


@functools.cache
def _tls() -> ssl.SSLContext:
    package = DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]  # httpx, or httpx2 from openai 3 on
    context: ssl.SSLContext = importlib.import_module(package).create_ssl_context()
    return context


def carry_clients() -> None:
    """Lets the clients that a framework's object holds travel to runner processes, without their connections."""
    for cls in (OpenAI, AsyncOpenAI):
        register_reducer(cls, _reduce)


def _reduce(client: Any) -> tuple[Any, tuple[Any, ...]]:
    settings = {
        "api_key": client.api_key,
        "organization": client.organization,
        "project": client.project,
        "base_url": str(client.base_url),
        "timeout": client.timeout,
        "max_retries": client.max_retries,
        "default_headers": dict(client._custom_headers),
        "default_query": dict(client._custom_query),
    }
    if hasattr(client, "_api_version"):  # of Azure
        settings["api_version"] = client._api_version
    return _make, (type(client), settings)


def _make(cls: type[Any], settings: dict[str, Any]) -> Any:
    return cls(**settings)
