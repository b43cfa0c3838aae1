"""Sends calls to backends: retries, failover, and never the agent's key."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeAlias

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from agentlightning_plugins.gateway.backends.backend import Backend, describe_error
from agentlightning_plugins.gateway.backends.idle_timeout import IdleTimeout
from agentlightning_plugins.gateway.backends.provider import BackendAnswer
from agentlightning_plugins.gateway.dialects.dialect import Dialect, Untranslatable
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json, set_fields
from agentlightning_plugins.gateway.recording.call import Call

RETRIED_STATUS: Final = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
_CONNECT_TIMEOUT_S: Final = 10.0
_IDLE_S: Final = 4.0  # less than uvicorn's 5 s, so that we rarely send into a connection that it is closing
_FIRST_BACKOFF_S: Final = 0.25
_MAX_WAIT_S: Final = 30.0
_COOLDOWN_S: Final = 1.0  # how long a backend that failed is tried last

_HOP_BY_HOP: Final = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_NOT_SENT: Final = _HOP_BY_HOP | frozenset(
    # The agent's credentials, and what describes its connection or its encoding of the body rather than ours.
    "authorization api-key x-api-key cookie host content-length content-encoding accept-encoding expect "
    "traceparent tracestate openai-organization openai-project".split()
)
_NOT_RELAYED: Final = _HOP_BY_HOP | frozenset("content-length content-encoding set-cookie server date".split())


class Reply(NamedTuple):
    """What to tell the agent, all of it."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    error: str | None = None
    """For the span; None when the backend gave an answer."""
    is_final: bool = False
    """Whether trying again would do harm."""


Outcome: TypeAlias = Reply | BackendAnswer
"""A reply, or a stream of events that is still to be read and closed."""


class Upstream:
    """The pooled connections to all backends."""

    def __init__(self, num_retries: int, read_timeout_s: float) -> None:
        """Must be made on the event loop that uses it.

        Args:
            num_retries: further rounds over a model's backends after the first.
            read_timeout_s: how long a backend may be silent.
        """
        self._num_retries = num_retries
        self._read_timeout_s = read_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def send(self, call: Call, backends: list[Backend], headers: Mapping[str, str]) -> Outcome:
        """Sends a call to the first backend that takes it.

        Connect errors and ``RETRIED_STATUS`` move on to the next backend at once; after all have been tried, a new
        round begins after a back-off, or when the backend's Retry-After says. A backend that took the call and fell
        silent is not asked again: it may be at work on it.

        Args:
            call: is told the backend.
            backends: in the order to try; not empty.
            headers: those of the agent.

        Returns:
            The stream of a backend, or what to tell the agent.
        """
        sent_headers = {name: value for name, value in headers.items() if name.lower() not in _NOT_SENT}
        sent_headers["traceparent"] = call.trace.to_header()
        failure: Reply | None = None
        for round_number in range(self._num_retries + 1):
            if failure is not None:
                wait_s = _wait_s(round_number, failure)
                if wait_s is None:
                    break
                await asyncio.sleep(wait_s)
            for backend in backends:
                try:
                    call.prepare_for(backend)
                except Untranslatable as error:
                    return refuse(call.dialect, 400, str(error), error.code)
                except (AttributeError, KeyError, TypeError) as error:  # what a request of the wrong shape raises
                    return refuse(call.dialect, 400, f"the request is malformed: {error!r}", "invalid_request")
                outcome = await self._try(call, backend, sent_headers)
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

    async def _try(self, call: Call, backend: Backend, headers: Mapping[str, str]) -> Outcome:
        wanted = call.wire.fields_to_ask(call.asked)
        fields = {name: value for name, value in wanted.items() if name not in backend.refused}
        outcome = await self._post(call, backend, headers, fields)
        if isinstance(outcome, Reply) and outcome.status in (400, 422):
            blamed = {name for name in fields if name.encode() in outcome.body}
            if blamed:
                fields = {name: value for name, value in fields.items() if name not in blamed}
                outcome = await self._post(call, backend, headers, fields)
                if not isinstance(outcome, Reply) or outcome.error is None:  # else it had merely quoted the request
                    backend.refused |= blamed
        return outcome

    async def _post(
        self, call: Call, backend: Backend, headers: Mapping[str, str], fields: Mapping[str, Any]
    ) -> Outcome:
        fields = {**fields, "model": backend.served_model, **backend.sampling_parameters}
        headers = backend.authorize(headers)
        if call.sent_text is not None:
            body = set_fields(call.sent_text, call.sent_body, fields)
        else:
            body = dump_json({**call.sent_body, **fields})
        try:
            with IdleTimeout(self._read_timeout_s) as idle:
                response = await backend.provider.send(self._session, backend, call.path, body, headers)
                idle.reset()
                if response.status == 200 and response.content_type == "text/event-stream":
                    return response
                async with response:
                    answer, headers_back = await response.read(), relayed_headers(response.headers)
            if 200 <= response.status < 300:
                return Reply(response.status, answer, headers_back)
            return _read_error(call, backend, response.status, headers_back, answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cannot_connect = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
            if isinstance(error, TimeoutError) and not cannot_connect:
                message = f"{backend.endpoint} did not answer in time: {error}"
                return refuse(call.dialect, 504, message, "backend_timeout")._replace(is_final=True)
            if cannot_connect:
                backend.mark(describe_error(error))
            # Not its repr, which may have the headers that we sent, and so the key.
            message = f"{backend.endpoint} cannot be reached: {describe_error(error)}"
            return refuse(call.dialect, 502, message, "backend_unreachable")


def refuse(dialect: Dialect, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Reply:
    """An error of the gateway's own, in the form of an API."""
    body = dump_json(dialect.error_body(status, message, code))
    return Reply(status, body, {"Content-Type": "application/json", **(headers or {})}, message)


def relayed_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of a backend's answer that the agent gets too."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_RELAYED)


def _read_error(call: Call, backend: Backend, status: int, headers: Mapping[str, str], body: bytes) -> Reply:
    body = backend.redact_key(body)
    try:
        answer = parse_json(body)
        error = answer.get("error", answer)
        message = str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
    except (AttributeError, ValueError):
        message = f"{backend.endpoint} answered {status}: {body[:500].decode(errors='replace')}"
        return refuse(call.dialect, status if status >= 400 else 502, message, "bad_gateway")
    if call.translation is not None:
        code = error.get("code") if isinstance(error, dict) else None
        body = dump_json(call.dialect.error_body(status, message, code if isinstance(code, str) else None))
    return Reply(status, body, headers, message)


def _wait_s(round_number: int, reply: Reply) -> float | None:
    """How long to wait before a round; None when the backend asks for more patience than the gateway has."""
    backoff_s = _FIRST_BACKOFF_S * 2 ** (round_number - 1) * random.uniform(0.5, 1.0)
    wait_s = max(backoff_s, _retry_after_s(reply) or 0.0)
    return wait_s if wait_s <= _MAX_WAIT_S else None


def _retry_after_s(reply: Reply) -> float | None:
    value = reply.headers.get("Retry-After")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        return _until(value)


def _until(date: str) -> float | None:
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except ValueError:
        return None
