"""Sends calls to backends, with retries and failover, and checks which backends are up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.backends.provider import (
    MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES,
    BackendAnswer,
    IteratedAnswer,
    ModelBackend,
    describe_error,
    idle_timeout,
    once,
)
from agentlightning_plugins.gateway.call import BackendRequest, ModelCall
from agentlightning_plugins.gateway.dialects.dialect import (
    MALFORMED,
    CallRefused,
    Completion,
    Dialect,
    TranslationError,
)
from agentlightning_plugins.gateway.dialects.wire import (
    BYTE_ORDER_MARK,
    dump_json,
    looks_like_events,
    parse_json,
    read_events,
)

logger = logging.getLogger("agentlightning")
RETRIED_STATUS: Final = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_CONNECT_TIMEOUT_S: Final = 10.0
_KEEPALIVE_S: Final = 4.0  # shorter than uvicorn's 5 s, so that we rarely use a connection that it is closing
_FIRST_BACKOFF_S: Final = 0.25
_MAX_WAIT_S: Final = 30.0
_SILENT: Final = "backend_timeout"
"""The code of a call that is not tried again."""
_COOLDOWN_S: Final = 1.0  # how long a backend that failed is tried last

_SENT: Final = frozenset(
    "accept anthropic-beta anthropic-version idempotency-key openai-beta user-agent x-client-request-id "
    "x-request-id".split()
)
"""Headers of the agent that backends get. Others could carry credentials, or change the meaning of the request."""
_RELAYED: Final = frozenset(
    "cache-control content-type openai-model openai-processing-ms openai-version request-id retry-after "
    "retry-after-ms x-request-id x-should-retry x-weight-version".split()
)
"""Headers of backends that agents get, in addition to those with ``_RELAYED_PREFIXES``."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Control characters that are not allowed in a header value, such as the line break of a folded line."""
_RELAYED_PREFIXES: Final = ("anthropic-ratelimit-", "x-ratelimit-")


_is_reused: ContextVar[bool] = ContextVar("agentlightning_is_reused")
"""Whether the connection of the current request has served an earlier one."""


async def _note_reuse(session: object, context: object, parameters: object) -> None:
    _is_reused.set(True)


class Reply(NamedTuple):
    """A whole answer for the agent, without an error."""

    status: int
    body: bytes
    """As the backend sent it: it may contain the backend's key."""
    headers: Mapping[str, str]


class Upstream:
    """The pooled connections to all backends."""

    def __init__(self, num_retries: int, read_timeout_s: float) -> None:
        """Opens the session; must be called on the event loop that uses it."""
        self._num_retries = num_retries  # further rounds over a model's backends
        self._read_timeout_s = read_timeout_s
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            trace_configs=[trace],
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self, call: ModelCall, backends: list[ModelBackend], headers: Mapping[str, str]
    ) -> Reply | BackendAnswer:
        """Sends a call to the first backend that accepts it.

        After a connect error or one of ``RETRIED_STATUS`` the next backend is tried immediately. After all backends
        have been tried, a new round begins after a back-off, or after the last backend's Retry-After. If a backend
        accepts the call and falls silent, the call is not tried again, because the backend may still be working on it.
        A try on a connection that the backend has closed while it was idle does not count.
        Each try sets the call's backend and request.

        Returns:
            The whole answer, or a stream of events that the caller must read and close.

        Raises:
            CallRefused: the error of the last backend, which tells clients not to try again, or the call does not fit
                the backend.
        """
        sent_headers = {name: value for name, value in headers.items() if name.lower() in _SENT}
        sent_headers["Content-Type"] = "application/json"
        sent_headers["traceparent"] = call.trace.to_header()
        failure: CallRefused | None = None
        for round_number in range(self._num_retries + 1):
            if failure is not None:
                wait_s = _wait_s(round_number, failure)
                if wait_s > _MAX_WAIT_S:
                    break
                await asyncio.sleep(wait_s)
            for backend in backends:
                call.backend = backend
                try:
                    call.request = call.prepare(backend)
                except TranslationError as error:
                    raise CallRefused(400, str(error), error.code) from None
                except MALFORMED as error:
                    raise CallRefused(400, f"the request is malformed: {error!r}", "invalid_request") from None
                try:
                    answer = await self._try(call.dialect, call.request, sent_headers)
                except CallRefused as error:
                    if error.status not in RETRIED_STATUS:
                        raise
                    backend.retry_at = time.monotonic() + (_retry_after_s(error) or _COOLDOWN_S)
                    headers = CIMultiDict({**error.headers, "x-should-retry": "false"})  # we have tried, or must not
                    failure = CallRefused(error.status, str(error), error.code, headers, body=error.body)
                    if error.code == _SILENT:
                        raise failure from None
                else:
                    backend.mark(None)
                    return answer
        assert failure is not None
        raise failure

    async def _try(
        self, dialect: Dialect, request: BackendRequest, headers: Mapping[str, str]
    ) -> Reply | BackendAnswer:
        """Sends a request; if the backend refuses capture fields, sends it again without those that it names."""
        wanted, backend = request.dialect.capture_fields(request.options), request.backend
        fields = {name: value for name, value in wanted.items() if name not in backend.refused}
        blamed: set[str] = set()
        while True:
            try:
                answer = await self._post(dialect, request, headers, fields)
            except CallRefused as error:
                text = error.body if error.body is not None else str(error).encode(errors="replace")
                named = {name for name in fields if name.encode() in text} if error.status in (400, 422) else set()
                if not named:  # an earlier error may only have quoted the request, so ``refused`` stays
                    raise
                blamed |= named
                fields = {name: value for name, value in fields.items() if name not in named}
            else:
                backend.refused |= blamed
                return answer

    async def _post(
        self, dialect: Dialect, request: BackendRequest, headers: Mapping[str, str], fields: Mapping[str, Any]
    ) -> Reply | BackendAnswer:
        backend = request.backend
        body = request.encode({**fields, "model": backend.served_model, **request.sampling})
        try:
            async with idle_timeout(self._read_timeout_s) as keep_alive:
                _is_reused.set(False)
                send = functools.partial(
                    backend.provider.send, self._session, backend, request.path, body, backend.authorize(headers)
                )
                try:
                    response = await send()
                except (aiohttp.ServerDisconnectedError, ConnectionError):
                    if not _is_reused.get():
                        raise
                    response = await send()  # the backend has closed the connection while it was idle
                keep_alive()
                is_valid = not any(map(_CONTROL.search, response.headers.values()))
                is_stream, kind = bool(request.body.get("stream")), response.content_type
                if is_valid and response.status == 200 and kind == "text/event-stream" and is_stream:
                    return response
                async with response:
                    answer = await _read_answer(response, keep_alive) if is_valid else b""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cannot_connect = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            if isinstance(error, TimeoutError) and not cannot_connect:
                raise CallRefused(504, f"{backend.endpoint} did not answer in time: {error}", _SILENT) from None
            if cannot_connect:
                backend.mark(describe_error(error))
            # Not repr(error), which may contain the headers that we sent, and so the key.
            message = f"{backend.route} cannot be reached: {describe_error(error)}"
            raise CallRefused(502, message, "backend_unreachable") from None
        if not is_valid:
            raise CallRefused(502, f"{backend.endpoint} answered with a malformed header", "bad_gateway")
        relayed = relayed_headers(response.headers, backend)
        if not 200 <= response.status < 300:
            raise _read_error(dialect, request, response.status, relayed, backend.redactor.redact_error(answer))
        answer = answer.removeprefix(BYTE_ORDER_MARK)
        if response.status == 200:
            are_events = "json" not in kind and looks_like_events(answer)
            with contextlib.suppress(*MALFORMED):  # the relay refuses an answer that is neither
                if is_stream:
                    events = answer if are_events else _to_events(request.dialect, answer)
                    return IteratedAnswer(once(events), "text/event-stream", more_headers=relayed)
                if are_events:
                    answer = dump_json(request.dialect.collect(read_events(answer)))
                    relayed["Content-Type"] = "application/json"
        return Reply(response.status, answer, relayed)


def _to_events(dialect: Dialect, body: bytes) -> bytes:
    """Returns a whole answer to a request for a stream as a stream; raises ``MALFORMED`` or CallRefused."""
    answer, completion = parse_json(body), Completion()
    dialect.read_answer(answer, completion)
    if completion.error is not None:
        raise CallRefused(502, completion.error, "bad_gateway")
    return dialect.to_events(answer)


def relayed_headers(headers: CIMultiDictProxy[str], backend: ModelBackend) -> CIMultiDict[str]:
    """Returns the headers of a backend's answer that the agent gets."""
    return CIMultiDict(
        (name, backend.redactor.redact_answer(value.encode(errors="surrogateescape")).decode(errors="surrogateescape"))
        for name, value in headers.items()
        if (lower := name.lower()) in _RELAYED or lower.startswith(_RELAYED_PREFIXES)
    )


async def _read_answer(response: BackendAnswer, keep_alive: Callable[[], None]) -> bytes:
    """Reads a whole body; every byte restarts the timeout."""
    limit = MAX_ANSWER_BYTES if 200 <= response.status < 300 else MAX_EVENT_BYTES
    pieces, size = [], 0
    while piece := await response.content.readany():
        keep_alive()
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise aiohttp.ClientPayloadError(f"its answer of status {response.status} is larger than {limit} bytes")
    return b"".join(pieces)


def _read_error(
    dialect: Dialect, request: BackendRequest, status: int, headers: Mapping[str, str], body: bytes
) -> CallRefused:
    """Returns the error of a backend for the agent: unchanged, or in the agent's dialect."""
    unknown = f"{request.backend.endpoint} answered {status}: {body[:500].decode(errors='replace')}"
    if not 400 <= status <= 599:  # agents cannot follow a redirect, and other codes are not HTTP status codes
        return CallRefused(502, unknown, "bad_gateway")
    try:
        answer = parse_json(body)
        error = answer.get("error", answer)
        message = str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
    except (AttributeError, ValueError):
        return CallRefused(status, unknown, "bad_gateway", headers)
    if request.translation is not None:
        code = error.get("code") if isinstance(error, dict) else None
        body = dump_json(dialect.error_body(status, message, code if isinstance(code, str) else None))
    return CallRefused(status, message, None, headers, body=body)


def _wait_s(round_number: int, error: CallRefused) -> float:
    """Returns the wait before a round: an exponential back-off with jitter, or the longer Retry-After."""
    backoff_s = _FIRST_BACKOFF_S * 2.0 ** (round_number - 1) * random.uniform(0.5, 1.0)
    return max(backoff_s, _retry_after_s(error))


def _retry_after_s(error: CallRefused) -> float:
    """Returns the seconds of Retry-After, a number or a date; 0 if it is absent or malformed."""
    value = error.headers.get("Retry-After", "0")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


INTERVAL_S: Final = 10.0
"""Seconds between checks of a backend that is up."""
_DOWN_INTERVAL_S: Final = 1.0
"""Seconds between checks of a backend that is down, unless the other interval is shorter."""
_MAX_SILENCES: Final = 3
"""Unanswered checks in a row until a backend counts as down: a server that trains or compiles is only busy."""


@dataclass
class HealthCheck:
    """Requests the models of each backend every few seconds. Any status below 500 shows that the backend is up."""

    models: ModelTable
    interval_s: float
    timeout_s: float = 5.0
    _silences: Counter[bytes] = field(default_factory=Counter, init=False)
    _broken: set[bytes] = field(default_factory=set, init=False)
    """Backends whose provider raised an unexpected error, which is logged once."""

    async def run(self) -> None:
        """Checks until cancelled."""
        clock = asyncio.get_running_loop().time
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),  # each check opens a new connection
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=self.timeout_s / 2),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            next_round = clock()
            while True:
                is_round = clock() >= next_round
                due = [b for b in self.models.backends if b.endpoint and (is_round or not b.is_up)]
                await asyncio.gather(*(self._check(session, backend) for backend in due))
                if is_round:
                    next_round = clock() + self.interval_s
                await asyncio.sleep(min(_DOWN_INTERVAL_S, self.interval_s))

    async def _check(self, session: aiohttp.ClientSession, backend: ModelBackend) -> None:
        failure = None
        try:
            url, headers = backend.url("models"), backend.authorize({})
            async with session.get(url, headers=headers, allow_redirects=False, proxy=backend.proxy) as answer:
                if answer.status >= 500:
                    failure = f"GET {url} answered {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = describe_error(error)
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                self._silences[backend.identity] += 1
                if self._silences[backend.identity] < _MAX_SILENCES:
                    return
                failure = f"it did not answer for {self.timeout_s:g} s, {_MAX_SILENCES} times in a row"
        except Exception:  # isolation point: a provider may be third-party code, and the other backends need checks
            if backend.identity not in self._broken:
                self._broken.add(backend.identity)
                logger.exception("backend %s of model %r cannot be checked", backend.endpoint, backend.model)
            return
        else:
            self._silences.pop(backend.identity, None)
        backend.mark(failure)
