"""HTTP to one store server: a pooled session for each event loop, retries, and errors as exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from pydantic_core import PydanticSerializationError, from_json, to_json
from yarl import URL

from agentlightning.errors import ConfigError, LightningError, StoreError
from agentlightning.store.url import hide_password
from agentlightning_plugins.stores.http.message import ERRORS, FEATURES_HEADER, PREFIX, RUN_HEADER, check_token

logger = logging.getLogger("agentlightning")

_ANSWER_S: Final = 60.0
"""The longest time until an answer, without the wait that the request asks for."""
_CONNECT_S: Final = 5.0
_KEEPALIVE_S: Final = 30.0
_LARGE_BODY_BYTES: Final = 2**20
"""Larger bodies are sent in pieces, because sending them at once would block the loop."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_UNAVAILABLE: Final = frozenset({502, 503, 504})
_NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_CONNECTION_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)


class StoreConnection:
    """The connections to one server; may be used from several threads and event loops, and after a fork."""

    def __init__(self, url: str, token: str | None, retry_s: float) -> None:
        """Connects at the first request.

        Raises:
            ConfigError: not an http(s) URL, one with a password, or a token that cannot be sent.
        """
        if token is not None:
            check_token(token)
        if hide_password(url) != url:
            raise ConfigError(
                f"store URL {hide_password(url)!r} has a password, which a store does not take; give a token"
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"store URL {url!r}: give http://host:port, as in http://127.0.0.1:4747")
        self.url = url.rstrip("/").removesuffix(PREFIX)
        self.token = token
        self.retry_s = retry_s
        self.features: frozenset[str] | None = None
        """Capabilities of the store behind the server; None until it has answered once."""
        self._is_unreachable = False
        self._opening: set[asyncio.Future[None]] = set()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        if parts.hostname in _LOOPBACK_HOSTS:
            headers["accept-encoding"] = "identity"  # compressing would take longer than sending
        self._pool = _SessionPool(headers)

    async def request(
        self, method: str, path: str, body: Any = None, *, run_id: str, repeatable: bool, wait_s: float = 0.0
    ) -> Any:
        """Sends a request and returns the decoded answer.

        Args:
            method: GET or POST.
            path: below the prefix, its parts quoted.
            body: anything pydantic can write as JSON; None for no body.
            run_id: the run that the request is about.
            repeatable: whether sending it twice does what sending it once does. Only then is a request repeated whose
                answer was lost; one that was not sent is always repeated.
            wait_s: how long the request asks the server to wait.

        Raises:
            NotFoundError, ConflictError, ConfigError: the error that the store raised.
            StoreError: the server is unreachable, failed, or is not a store server.
        """
        if self._opening:
            await self._subscriptions_opened()
        session = self._pool.session()
        url = URL(self.url + PREFIX + path, encoded=True)
        headers = {RUN_HEADER: run_id}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = _encode(body)
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S + wait_s, sock_connect=_CONNECT_S)
        retry = _Retry(self.retry_s)
        while True:
            data = io.BytesIO(content) if content and len(content) > _LARGE_BODY_BYTES else content
            try:
                async with session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                    answer = await response.read()
                    self._is_unreachable = False
            except _CONNECTION_ERRORS as error:
                if not repeatable and not isinstance(error, _NOT_SENT):
                    raise StoreError(
                        f"the connection to {self.url} broke during {method} {path}, "
                        f"and it is not known whether the store has executed it ({_describe(error)})"
                    ) from error
                self._warn(error)
                await retry.pause(self._describe_unreachable(error), error)
                continue
            if self.features is None and FEATURES_HEADER in response.headers:
                self.features = frozenset(response.headers[FEATURES_HEADER].split(","))
            if response.status < 300:
                return from_json(answer)
            if response.status in _UNAVAILABLE and repeatable and FEATURES_HEADER not in response.headers:  # a proxy's
                await retry.pause(f"{self.url} answers {response.status} {response.reason}", None)
                continue
            raise _error_of(self.url, response.status, answer)

    async def events(self, path: str, *, run_id: str) -> AsyncGenerator[bytes]:
        """Yields the data of server-sent events; reconnects when the stream ends, and resumes where it ended.

        Later requests of the same loop wait until the stream is open, so that the stream includes their events.

        Raises:
            StoreError: as ``request``; or the reader was too slow and events were lost.
        """
        url = URL(self.url + PREFIX + path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_ANSWER_S)
        retry = _Retry(self.retry_s)
        headers = {RUN_HEADER: run_id}
        opened = asyncio.get_running_loop().create_future()
        self._opening.add(opened)
        try:
            while True:
                try:
                    async with self._pool.session().get(url, headers=headers, timeout=timeout) as response:
                        if response.status >= 300 and response.status not in _UNAVAILABLE:
                            raise _error_of(self.url, response.status, await response.read())
                        if response.status < 300:
                            self._has_opened(opened)
                            self._is_unreachable = False
                            retry = _Retry(self.retry_s)
                            async for event in _read_events(response.content):
                                if event.get("id"):
                                    headers["last-event-id"] = event["id"].decode()
                                    yield event["data"]
                                elif event["event"] == b"overflow":
                                    raise StoreError(from_json(event["data"])["message"])
                except _CONNECTION_ERRORS as error:
                    self._warn(error)
                    await retry.pause(self._describe_unreachable(error), error)
                else:
                    await retry.pause(f"{self.url} ends every event stream", None)
        finally:
            self._has_opened(opened)

    def _has_opened(self, opened: asyncio.Future[None]) -> None:
        self._opening.discard(opened)
        if not opened.done():
            opened.set_result(None)

    async def _subscriptions_opened(self) -> None:
        loop = asyncio.get_running_loop()
        opening = [opened for opened in tuple(self._opening) if opened.get_loop() is loop]
        if opening:
            await asyncio.wait(opening)

    async def close(self) -> None:
        """Closes the sessions of all loops; a later request opens new ones."""
        await self._pool.close()

    def _warn(self, error: BaseException) -> None:
        """Warns once that the server is unreachable, because retries may take half a minute."""
        if isinstance(error, _NOT_SENT) and not self._is_unreachable and self.retry_s > 1:
            self._is_unreachable = True
            logger.warning("%s Trying again for %g s.", self._describe_unreachable(error), self.retry_s)

    def _describe_unreachable(self, error: BaseException) -> str:
        return f"cannot reach a store at {self.url} ({_describe(error)}); is `agl store` running there?"


class _Retry:
    """Pauses of growing, random length between the tries of one request, until its time is used up."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends_at: float | None = None
        self._longest_s = _FIRST_PAUSE_S

    async def pause(self, failure: str, cause: BaseException | None) -> None:
        """Waits before the next try.

        Raises:
            StoreError: with ``failure``, when no time is left.
        """
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + self._limit_s
        if now >= self._ends_at:
            raise StoreError(failure) from cause
        await asyncio.sleep(min(random.uniform(0.2, 1.0) * self._longest_s, self._ends_at - now))
        self._longest_s = min(2 * self._longest_s, _LONGEST_PAUSE_S)


class _SessionPool:
    """One aiohttp session for each event loop of this process, closed with its loop."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self._lock = threading.Lock()
        self._process_id = os.getpid()
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    def session(self) -> aiohttp.ClientSession:
        """The session of the running loop."""
        if self._process_id != os.getpid():  # forked: the sockets and the lock belong to the parent
            self._lock = threading.Lock()
            self._process_id = os.getpid()
            self._sessions = {}
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=_KEEPALIVE_S
                ),  # each waiting request holds one
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=("user-agent", "accept"),
            )
            with self._lock:
                self._sessions = {other: kept for other, kept in self._sessions.items() if not other.is_closed()}
                self._sessions[loop] = session
            _close_with_loop(session)
        return session

    async def close(self) -> None:
        with self._lock:
            sessions, self._sessions = self._sessions, {}
        here = asyncio.get_running_loop()
        elsewhere = []
        for loop, session in sessions.items():
            if loop is here:
                await session.close()
            elif loop.is_running():
                elsewhere.append(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop)))
        if elsewhere:
            await asyncio.wait(elsewhere, timeout=_CONNECT_S)


def _close_with_loop(session: aiohttp.ClientSession) -> None:
    """Makes the running loop close the session when it ends, by a generator that the loop shuts down."""

    async def hold() -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await session.close()

    holder = hold()
    with contextlib.suppress(StopIteration):  # runs to the first yield
        holder.__anext__().send(None)
    _holders[session] = holder


_holders: Final[weakref.WeakKeyDictionary[aiohttp.ClientSession, AsyncGenerator[None]]] = weakref.WeakKeyDictionary()


def _encode(body: Any) -> bytes:
    try:
        return to_json(body, inf_nan_mode="constants")  # the server refuses NaN; null would be silent
    except PydanticSerializationError as error:
        raise ConfigError(f"requests to the store must be JSON: {error}") from error


def _error_of(url: str, status: int, answer: bytes) -> LightningError:
    try:
        content = from_json(answer)
        code, message = content["code"], content["message"]
    except (ValueError, TypeError, KeyError):
        text = answer[:200].decode(errors="replace")
        return StoreError(
            f"{url} answered {status} and is not a store server: {text!r}; is it the URL of an `agl store`?"
        )
    _, error_type = ERRORS.get(code, (0, StoreError))
    return error_type(message)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _read_events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, bytes]]:
    """The fields of each server-sent event; comments are left out."""
    buffer = b""
    async for chunk in content.iter_any():
        *events, buffer = (buffer + chunk).split(b"\n\n")
        for event in events:
            if not event.startswith(b":"):
                pairs = (line.partition(b": ") for line in event.split(b"\n"))
                yield {name.decode(): value for name, _, value in pairs}
