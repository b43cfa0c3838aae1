"""HTTP requests to the servers of a store: a pooled session for each event loop, retries, and errors as exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
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
from agentlightning_plugins.shared.token import StoreTokens
from agentlightning_plugins.stores.http.message import ERRORS, FEATURES_HEADER, PREFIX, RUN_HEADER, TIME_HEADER
from agentlightning_plugins.stores.shared.clock import ServerClock, since_boot

logger = logging.getLogger("agentlightning")

_ANSWER_S: Final = 60.0
"""Time limit for an answer, in addition to the wait that the request asks for."""
_CONNECT_S: Final = 5.0
_KEEPALIVE_S: Final = 30.0
_POLL_S: Final = 20.0
_SILENCE_S: Final = 10.0
"""The server sends a comment every 4 s: a stream that is silent for longer is broken, or a proxy holds it back if
nothing of it has arrived."""
_POLLING_S: Final = 600.0
"""After this time of polling, a stream is tried again."""
_RETURN_S: Final = 15.0
"""How long, at least, a client stays with another server before it tries its preferred one again."""
_LARGE_BODY_BYTES: Final = 2**20
"""Larger bodies are sent in pieces, because sending them in one piece would block the loop."""
_COMPRESSED_BYTES: Final = 4096
"""Larger bodies are compressed on their way to another machine."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_UNAVAILABLE: Final = frozenset({502, 503, 504})
_NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_CONNECTION_ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)


class StoreConnection:
    """Connections to one store, which has one or several servers; only one of the servers is used at a time.

    May be used from several threads and event loops, and after a fork.
    """

    def __init__(self, urls: str, token: str | None, retry_s: float) -> None:
        """Connects at the first request, to one of the servers.

        Args:
            urls: URLs of servers of the same store, separated by commas. When one fails, the next is tried.
            token: the token of all servers; None takes the token of the environment and follows changes of its file.
            retry_s: how long a request is retried when none of the servers can be reached.

        Raises:
            ConfigError: a URL is not http(s) or has a password, or the token cannot be sent.
        """
        self.given_token = token or None
        self._tokens = StoreTokens(token, None) if token else StoreTokens.of_environment()
        self.urls = tuple(_check_url(url) for url in urls.split(","))
        self._preferred = self._current = random.randrange(len(self.urls))
        """The servers of a store share its clients: each client begins at one of them, and returns to it."""
        self._returns_at = 0.0
        self._returning: asyncio.Task[None] | None = None
        self.retry_s = retry_s
        self.features: frozenset[str] | None = None
        """Capabilities of the store behind the server; None until the server has answered once."""
        self.clock = ServerClock(urls)
        self._is_unreachable = False
        self._polls_until = 0.0
        """Until when (``time.monotonic()``) events are read by long polling, because event streams do not arrive."""
        self._opening: set[asyncio.Future[None]] = set()
        headers = {}
        self._compresses = any(urlsplit(url).hostname not in _LOOPBACK_HOSTS for url in self.urls)
        if not self._compresses:
            headers["accept-encoding"] = "identity"  # compressing would take longer than sending
        self._pool = _SessionPool(headers)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The token that requests are sent with, and further ones that servers accept."""
        return self._tokens.current

    @tokens.setter
    def tokens(self, tokens: tuple[str, ...]) -> None:
        self._tokens = StoreTokens(tokens[0] if tokens else None, None)

    @property
    def _polls_events(self) -> bool:
        return time.monotonic() < self._polls_until

    @property
    def url(self) -> str:
        """URL of the server in use, without a path."""
        return self.urls[self._current]

    async def request(
        self, method: str, path: str, body: Any = None, *, run_id: str, repeatable: bool, wait_s: float = 0.0
    ) -> Any:
        """Sends a request and returns the decoded answer.

        Args:
            method: GET or POST.
            path: path below the prefix, with quoted parts.
            body: anything pydantic can write as JSON; None for no body.
            run_id: the run that the request is about.
            repeatable: whether the request is idempotent. A request whose answer was lost is repeated only if it is
                idempotent; a request that was not sent is always repeated.
            wait_s: how long the server may wait, as requested, before it answers.

        Raises:
            NotFoundError, ConflictError, ConfigError: the error that the store raised.
            StoreError: the server is unreachable, failed, or is not a store server.
        """
        if self._opening:
            await self._subscriptions_opened()
        if self._current != self._preferred and time.monotonic() > self._returns_at:
            self._returns_at = time.monotonic() + _RETURN_S * random.uniform(1.0, 2.0)
            self._returning = asyncio.create_task(self._return())
        session = self._pool.session()
        headers = {RUN_HEADER: run_id, **self._authorization()}
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = _encode(body)
            if self._compresses and len(content) > _COMPRESSED_BYTES:
                headers["content-encoding"] = "gzip"
                content = await asyncio.to_thread(gzip.compress, content, 1)  # it releases the GIL
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S + wait_s, sock_connect=_CONNECT_S)
        retry = _Retry(self.retry_s)
        while True:
            data = io.BytesIO(content) if content and len(content) > _LARGE_BODY_BYTES else content
            sent_at, server = since_boot(), self.url
            url = URL(server + PREFIX + path, encoded=True)
            try:
                async with session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                    answer = await response.read()
                    self._is_unreachable = False
            except _CONNECTION_ERRORS as error:
                if isinstance(error, TimeoutError) and not isinstance(error, _NOT_SENT) and await self._answers(server):
                    raise StoreError(
                        f"{server} is there, but has not answered {method} {path} within {timeout.total:g} s; the "
                        "request was not sent again. It may still be executed. Ask for less at once (limit=, cursor=)"
                    ) from error
                if not repeatable and not isinstance(error, _NOT_SENT):
                    raise StoreError(
                        f"the connection to {self.url} broke during {method} {path}, "
                        f"and it is not known whether the store has executed it ({_describe(error)})"
                    ) from error
                self._warn(error)
                self._leave(server)
                await retry.pause(self._describe_unreachable(error), error)
                continue
            if self.clock.is_due and not wait_s and TIME_HEADER in response.headers:
                self.clock.set(float(response.headers[TIME_HEADER]), sent_at)
            if self.features is None and FEATURES_HEADER in response.headers:
                self.features = frozenset(response.headers[FEATURES_HEADER].split(","))
            if response.status < 300:
                return from_json(answer)
            if response.status in _UNAVAILABLE and repeatable and FEATURES_HEADER not in response.headers:  # a proxy's
                self._leave(server)
                await retry.pause(f"{self.url} answers {response.status} {response.reason}", None)
                continue
            if response.status == 401 and self._renew_token(headers):
                continue
            raise _error_of(self.url, response.status, answer)

    async def events(self, path: str, *, run_id: str) -> AsyncGenerator[bytes]:
        """Yields the data of server-sent events; reconnects when the stream ends, and resumes where it ended.

        Later requests of the same loop wait until the stream is open, so that the stream includes their events. If a
        proxy holds the stream back, events are read by long polling.

        Raises:
            StoreError: as ``request``; or the reader was too slow and events were lost.
        """
        retry = _Retry(self.retry_s)
        headers = {RUN_HEADER: run_id, **self._authorization()}
        opened = asyncio.get_running_loop().create_future()
        self._opening.add(opened)
        try:
            while True:
                server, has_arrived = self.url, False
                url = URL(server + PREFIX + path, encoded=True)
                try:
                    async with self._get_events(url, headers, _POLL_S if self._polls_events else None) as response:
                        if response.status in _UNAVAILABLE:
                            raise aiohttp.ClientConnectionError(f"{response.status} {response.reason}")
                        if response.status == 401 and self._renew_token(headers):
                            continue
                        if response.status >= 300:
                            raise _error_of(self.url, response.status, await response.read())
                        async for event in _read_events(response.content):
                            has_arrived = True
                            self._has_opened(opened)
                            self._is_unreachable = False
                            retry = _Retry(self.retry_s)
                            if event.get("event") == b"overflow":
                                raise StoreError(from_json(event["data"])["message"])
                            if "id" in event:
                                headers["last-event-id"] = event["id"].decode()
                                if "data" in event:
                                    yield event["data"]
                except _CONNECTION_ERRORS as error:
                    is_silent = isinstance(error, aiohttp.SocketTimeoutError) and not has_arrived
                    if not (is_silent and await self._can_poll(url, headers)):
                        self._warn(error)
                        self._leave(server)
                        await retry.pause(self._describe_unreachable(error), error)
                else:
                    if not self._polls_events:
                        await retry.pause(f"{self.url} ends every event stream", None)
        finally:
            self._has_opened(opened)

    def _get_events(
        self, url: URL, headers: dict[str, str], poll_s: float | None
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Requests a stream of events (``poll_s`` is None), or the next events within ``poll_s``."""
        silence_s = _SILENCE_S if poll_s is None else poll_s + _ANSWER_S
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        target = url if poll_s is None else url.update_query(poll_s=poll_s)
        return self._pool.session().get(target, headers=headers, timeout=timeout)

    async def _can_poll(self, url: URL, headers: dict[str, str]) -> bool:
        """Switches to polling if a poll is answered although a stream was not; returns whether events are polled."""
        with contextlib.suppress(*_CONNECTION_ERRORS):
            async with self._get_events(url, {**headers, "last-event-id": ""}, poll_s=0.0) as response:
                await response.read()
            if response.status < 300 and not self._polls_events:
                level = logging.INFO if self._polls_until else logging.WARNING
                self._polls_until = time.monotonic() + _POLLING_S
                logger.log(
                    level,
                    "%s answers requests, but its event stream does not arrive: a proxy in between holds it back. "
                    "Events are polled instead. Turn the proxy's buffering off for %s (nginx: proxy_buffering off)",
                    self.url,
                    url.path,
                )
        return self._polls_events

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

    def _authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[0]}"} if self.tokens else {}

    def _renew_token(self, headers: dict[str, str]) -> bool:
        """Puts a newer token of the file into a refused request's headers; returns whether there is one."""
        self._tokens.refresh()
        sent, headers["authorization"] = headers.get("authorization"), ""
        headers |= self._authorization()
        return headers["authorization"] not in (sent, "")

    def _leave(self, server: str) -> None:
        """Switches to the next server, unless another request has already done so."""
        if len(self.urls) > 1 and server == self.url:
            self._current = (self._current + 1) % len(self.urls)
            self._returns_at = time.monotonic() + _RETURN_S * random.uniform(1.0, 2.0)
            logger.warning("the store server %s fails; trying %s", server, self.url)

    async def _return(self) -> None:
        """Switches back to the preferred server if it answers again. Open streams of events stay where they are."""
        server = self.urls[self._preferred]
        if await self._answers(server):
            self._current = self._preferred
            logger.info("the store server %s answers again", server)

    async def _answers(self, server: str) -> bool:
        """Whether a server answers now."""
        timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
        with contextlib.suppress(*_CONNECTION_ERRORS):
            async with self._pool.session().get(URL(server + PREFIX + "/health"), timeout=timeout) as response:
                return response.status == 200
        return False

    def _warn(self, error: BaseException) -> None:
        """Warns once that the server is unreachable, because retries may take half a minute."""
        is_away = isinstance(error, _NOT_SENT) and not isinstance(error, aiohttp.ClientConnectorCertificateError)
        if len(self.urls) == 1 and is_away and not self._is_unreachable and self.retry_s > 1:
            self._is_unreachable = True
            logger.warning("%s Trying again for %g s.", self._describe_unreachable(error), self.retry_s)

    def _describe_unreachable(self, error: BaseException) -> str:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return (
                f"the certificate of {error.host}:{error.port} is not accepted ({error.certificate_error}); for a "
                "certificate authority of your own, set SSL_CERT_FILE to the file of its certificate"
            )
        return f"cannot reach a store at {', '.join(self.urls)} ({_describe(error)}); is `agl store` running there?"


def _check_url(url: str) -> str:
    if hide_password(url) != url:
        raise ConfigError(f"store URL {hide_password(url)!r} has a password, which a store does not take; give a token")
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"store URL {url!r}: give http://host:port, as in http://127.0.0.1:4747")
    return url.strip().rstrip("/").removesuffix(PREFIX)


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
        if now >= self._ends_at or isinstance(cause, aiohttp.ClientConnectorCertificateError):
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
        """Returns the session of the running loop."""
        if self._process_id != os.getpid():  # forked: the sockets and the lock belong to the parent
            self._lock = threading.Lock()
            self._process_id = os.getpid()
            self._sessions = {}
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                # Each waiting request holds a connection.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
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
    """Makes the running loop close the session when the loop ends, by a generator that the loop shuts down."""

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
    """Yields the fields of each server-sent event."""
    buffer = b""
    async for chunk in content.iter_any():
        *events, buffer = (buffer + chunk).split(b"\n\n")
        for event in events:
            pairs = (line.partition(b": ") for line in event.split(b"\n"))
            yield {name.decode(): value for name, _, value in pairs}
