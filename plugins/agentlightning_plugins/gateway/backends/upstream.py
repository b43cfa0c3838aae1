"""Sends calls to backends, with retries and failover."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeAlias

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from agentlightning_plugins.gateway.backends.backend import Backend, describe_error
from agentlightning_plugins.gateway.backends.idle_timeout import IdleTimeout
from agentlightning_plugins.gateway.backends.provider import MAX_ANSWER_BYTES, BackendAnswer
from agentlightning_plugins.gateway.backends.request import BackendRequest, prepare
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED, Dialect, TranslationError
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.recording.call import Call

RETRIED_STATUS: Final = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_CONNECT_TIMEOUT_S: Final = 10.0
_KEEPALIVE_S: Final = 4.0  # shorter than uvicorn's 5 s, so that we rarely use a connection that it is closing
_FIRST_BACKOFF_S: Final = 0.25
_MAX_WAIT_S: Final = 30.0
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


class Reply(NamedTuple):
    """A whole answer for the agent."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    error: str | None = None
    """The error message for the span; None if the backend answered without an error."""
    is_final: bool = False
    """Whether the call must not be tried again."""


Outcome: TypeAlias = Reply | BackendAnswer
"""A reply, or a stream of events that the caller must read and close."""


class Upstream:
    """The pooled connections to all backends."""

    def __init__(self, num_retries: int, read_timeout_s: float) -> None:
        """Opens the session; must be called on the event loop that uses it."""
        self._num_retries = num_retries  # further rounds over a model's backends
        self._read_timeout_s = read_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, call: Call, backends: list[Backend], headers: Mapping[str, str]) -> Outcome:
        """Sends a call to the first backend that accepts it.

        After a connect error or one of ``RETRIED_STATUS`` the next backend is tried immediately. After all backends
        have been tried, a new round begins after a back-off, or after the last backend's Retry-After. If a backend
        accepts the call and falls silent, the call is not tried again, because the backend may still be working on it.
        Each try sets the call's backend and request.
        """
        sent_headers = {name: value for name, value in headers.items() if name.lower() in _SENT}
        sent_headers["Content-Type"] = "application/json"
        sent_headers["traceparent"] = call.trace.to_header()
        failure: Reply | None = None
        for round_number in range(self._num_retries + 1):
            if failure is not None:
                wait_s = _wait_s(round_number, failure)
                if wait_s > _MAX_WAIT_S:
                    break
                await asyncio.sleep(wait_s)
            for backend in backends:
                call.backend = backend
                try:
                    call.request = prepare(call, backend)
                except TranslationError as error:
                    return refuse(call.dialect, 400, str(error), error.code)
                except MALFORMED as error:
                    return refuse(call.dialect, 400, f"the request is malformed: {error!r}", "invalid_request")
                outcome = await self._try(call.dialect, call.request, sent_headers)
                if not isinstance(outcome, Reply) or outcome.error is None:
                    backend.mark(None)
                    return outcome
                if outcome.status not in RETRIED_STATUS:
                    return outcome
                failure = outcome
                backend.retry_at = time.monotonic() + (_retry_after_s(outcome) or _COOLDOWN_S)
                if outcome.is_final:
                    return outcome
        assert failure is not None
        return failure

    async def _try(self, dialect: Dialect, request: BackendRequest, headers: Mapping[str, str]) -> Outcome:
        """Sends a request; if the backend refuses capture fields, sends it again without those that it names."""
        wanted, backend = request.dialect.capture_fields(request.options), request.backend
        fields = {name: value for name, value in wanted.items() if name not in backend.refused}
        blamed: set[str] = set()
        while True:
            outcome = await self._post(dialect, request, headers, fields)
            if not isinstance(outcome, Reply) or outcome.error is None:
                backend.refused |= blamed
                return outcome
            named = {name for name in fields if name.encode() in outcome.body} if outcome.status in (400, 422) else ()
            if not named:  # an earlier error may only have quoted the request, so ``refused`` stays
                return outcome
            blamed.update(named)
            fields = {name: value for name, value in fields.items() if name not in named}

    async def _post(
        self, dialect: Dialect, request: BackendRequest, headers: Mapping[str, str], fields: Mapping[str, Any]
    ) -> Outcome:
        backend = request.backend
        body = request.encode({**fields, "model": backend.served_model, **request.sampling})
        try:
            with IdleTimeout(self._read_timeout_s) as idle:
                authorized = backend.authorize(headers)
                response = await backend.provider.send(self._session, backend, request.path, body, authorized)
                idle.reset()
                is_valid = not any(map(_CONTROL.search, response.headers.values()))
                if is_valid and response.status == 200 and response.content_type == "text/event-stream":
                    return response
                async with response:
                    answer = await _read_answer(response, idle) if is_valid else b""
            if not is_valid:
                message = f"{backend.endpoint} answered with a malformed header"
                return refuse(dialect, 502, message, "bad_gateway")
            relayed = relayed_headers(response.headers, backend)
            if 200 <= response.status < 300:
                return Reply(response.status, backend.redact_answer(answer), relayed)
            return _read_error(dialect, request, response.status, relayed, answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cannot_connect = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            if isinstance(error, TimeoutError) and not cannot_connect:
                message = f"{backend.endpoint} did not answer in time: {error}"
                return refuse(dialect, 504, message, "backend_timeout")._replace(is_final=True)
            if cannot_connect:
                backend.mark(describe_error(error))
            # Not repr(error), which may contain the headers that we sent, and so the key.
            message = f"{backend.endpoint} cannot be reached: {describe_error(error)}"
            return refuse(dialect, 502, message, "backend_unreachable")


def refuse(dialect: Dialect, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Returns an error of the gateway itself, in the form of an API."""
    body = dump_json(dialect.error_body(status, message, code))
    return Reply(status, body, {"Content-Type": "application/json", **(headers or {})}, message)


def relayed_headers(headers: CIMultiDictProxy[str], backend: Backend) -> CIMultiDict[str]:
    """Returns the headers of a backend's answer that the agent gets."""
    return CIMultiDict(
        (name, backend.redact_answer(value.encode(errors="surrogateescape")).decode(errors="surrogateescape"))
        for name, value in headers.items()
        if (lower := name.lower()) in _RELAYED or lower.startswith(_RELAYED_PREFIXES)
    )


async def _read_answer(response: BackendAnswer, idle: IdleTimeout) -> bytes:
    """Reads a whole body; every byte restarts the timeout."""
    pieces, size = [], 0
    while piece := await response.content.readany():
        idle.reset()
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
    return b"".join(pieces)


def _read_error(
    dialect: Dialect, request: BackendRequest, status: int, headers: Mapping[str, str], body: bytes
) -> Reply:
    body = request.backend.redact_error(body)
    if not 400 <= status <= 599:  # agents cannot follow a redirect, and other codes are not HTTP status codes
        message = f"{request.backend.endpoint} answered {status}: {body[:500].decode(errors='replace')}"
        return refuse(dialect, 502, message, "bad_gateway")
    try:
        answer = parse_json(body)
        error = answer.get("error", answer)
        message = str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
    except (AttributeError, ValueError):
        message = f"{request.backend.endpoint} answered {status}: {body[:500].decode(errors='replace')}"
        refusal = refuse(dialect, status, message, "bad_gateway")
        relayed = CIMultiDict(headers)
        relayed.update(refusal.headers)
        return refusal._replace(headers=relayed)
    if request.translation is not None:
        code = error.get("code") if isinstance(error, dict) else None
        body = dump_json(dialect.error_body(status, message, code if isinstance(code, str) else None))
    return Reply(status, body, headers, message)


def _wait_s(round_number: int, reply: Reply) -> float:
    """Returns the wait before a round: an exponential back-off with jitter, or the longer Retry-After."""
    backoff_s = _FIRST_BACKOFF_S * 2.0 ** (round_number - 1) * random.uniform(0.5, 1.0)
    return max(backoff_s, _retry_after_s(reply))


def _retry_after_s(reply: Reply) -> float:
    """Returns the seconds of Retry-After, a number or a date; 0 if it is absent or malformed."""
    value = reply.headers.get("Retry-After", "0")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0
