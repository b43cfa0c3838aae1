"""Clients of ``openai`` for one attempt's endpoint. They share a TLS context, so creating one takes a millisecond."""

from __future__ import annotations

import contextlib
import functools
import importlib
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from openai.lib.azure import API_KEY_SENTINEL

from agentlightning.resources import LLM
from agentlightning_integrations.shared.object_copy import register_reducer


@contextlib.asynccontextmanager
async def async_client(llm: LLM) -> AsyncIterator[AsyncOpenAI]:
    """Yields a client for one rollout and closes it: connections belong to the event loop that opened them."""
    transport = DefaultAsyncHttpxClient(verify=_tls())
    async with AsyncOpenAI(
        base_url=llm.get_base_url(), api_key=llm.api_key or "unused", http_client=transport
    ) as client:
        yield client


@contextlib.contextmanager
def sync_client(llm: LLM) -> Iterator[OpenAI]:
    """Yields a client for one rollout that threads may share; leaving the block ends their calls."""
    transport = _StoppableClient(verify=_tls())
    try:
        yield OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused", http_client=transport)
    finally:
        transport.stop()


class Clients(NamedTuple):
    """Clients of one rollout, for frameworks that make both async and sync calls."""

    awaited: AsyncOpenAI
    blocking: OpenAI


@contextlib.asynccontextmanager
async def open_clients(llm: LLM | None) -> AsyncIterator[Clients | None]:
    """Yields both clients of a rollout; None without an LLM."""
    if llm is None:
        yield None
        return
    with sync_client(llm) as blocking:
        async with async_client(llm) as awaited:
            yield Clients(awaited, blocking)


class _StoppableClient(DefaultHttpxClient):
    """An HTTP client that can be stopped while other threads wait for answers.

    ``close`` would not wake the threads that wait on the closed sockets, and once a file descriptor is reused, its
    thread would wait on an unrelated socket. ``shutdown`` wakes the threads; each closes its own connection.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_flight = 0
        self._is_stopped = False

    def send(self, request: Any, **settings: Any) -> Any:
        """Sends a request.

        Raises:
            RuntimeError: the client was stopped.
        """
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the rollout of this client is over")
            self._in_flight += 1
        try:
            request.extensions = {**request.extensions, "trace": self._on_transport_event}
            response = super().send(request, **settings)
            if settings.get("stream"):
                with self._lock:
                    self._streams.add(response)
            return response
        finally:
            with self._lock:
                self._in_flight -= 1
            self._close_if_done()

    def stop(self) -> None:
        """Ends the requests in flight and refuses later ones."""
        with self._lock:
            self._is_stopped = True
            connections = list(self._sockets)
        for connection in connections:
            _shut_down(connection)
        self._close_if_done()

    def _close_if_done(self) -> None:
        with self._lock:
            is_done = self._is_stopped and not self._in_flight and all(stream.is_closed for stream in self._streams)
        if is_done:
            self.close()

    def _on_transport_event(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by httpx at every step of a request; records new sockets, or shuts them down after ``stop``."""
        stream = info.get("return_value")
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")) or stream is None:
            return
        connection = stream.get_extra_info("socket")
        with self._lock:
            self._sockets.add(connection)
            is_stopped = self._is_stopped
        if is_stopped:  # during the connect
            _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)


def http_package() -> str:
    """Returns ``httpx``, or ``httpx2`` from openai 3 on."""
    return DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]


@functools.cache
def _tls() -> ssl.SSLContext:
    context: ssl.SSLContext = importlib.import_module(http_package()).create_ssl_context()
    return context


def _reduce(client: Any) -> tuple[Any, tuple[Any, ...]]:
    """Pickles a client by its settings, without its connections."""
    settings = {
        "organization": client.organization,
        "project": client.project,
        "base_url": str(client.base_url),
        "timeout": client.timeout,
        "max_retries": client.max_retries,
        "default_headers": dict(client._custom_headers),
        "default_query": dict(client._custom_query),
        **_credentials(client),
    }
    cls: Callable[..., Any] = type(client)
    return functools.partial(cls, **settings), ()


def _credentials(client: Any) -> dict[str, Any]:
    """Returns the credentials; a function that provides a key stays a function, since its keys expire."""
    found: dict[str, Any] = {"api_key": getattr(client, "_api_key_provider", None) or client.api_key}
    for name in ("admin_api_key", "webhook_secret", "workload_identity"):
        value = getattr(client, name, None)  # not in every version of openai
        if value is not None:
            found[name] = value
    if "workload_identity" in found:
        found["api_key"] = None  # a placeholder
    if hasattr(client, "_api_version"):  # a client of Azure
        found["api_version"] = client._api_version
        found["azure_ad_token"] = client._azure_ad_token
        found["azure_ad_token_provider"] = client._azure_ad_token_provider
        if found["api_key"] == API_KEY_SENTINEL:
            found["api_key"] = None
    return found


for _client in (OpenAI, AsyncOpenAI):
    register_reducer(_client, _reduce)
