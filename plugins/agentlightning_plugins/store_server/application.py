"""Turns the table of routes into an aiohttp application: who may ask, what was asked, and how to answer."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Handler, Middleware
from multidict import MultiMapping
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID, PaginatedResult, Record
from agentlightning_plugins.store_message import (
    ERROR_STATUS,
    FEATURES_HEADER,
    MAX_BODY_BYTES,
    PREFIX,
    RUN_HEADER,
    ErrorCode,
    Subscribe,
)
from agentlightning_plugins.store_server.events import stream_events
from agentlightning_plugins.store_server.polling import Polls
from agentlightning_plugins.store_server.routes import ROUTES, Context, Route

logger = logging.getLogger("agentlightning")

_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_LIST_KEYS = frozenset({"status_in", "rollout_id_in", "kinds"})
"""Keys that may stand several times in a query string."""


def build_application(store: LightningStore, polls: Polls, token: str | None) -> web.Application:
    """The REST contract over ``store``.

    Args:
        store: serves every run through ``with_run``.
        polls: what ends waiting requests when the server stops.
        token: what clients must show as ``Authorization: Bearer``; None lets everybody in who is on this machine.
    """
    guard = _guard(token, features=",".join(name for name, able in store.capabilities.items() if able))
    application = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    view = functools.lru_cache(maxsize=128)(store.with_run)
    for route in ROUTES:
        application.router.add_route(route.method, PREFIX + route.path, _handler(route, view, polls))
    application.router.add_route("GET", PREFIX + "/events", _events_handler(view, polls))
    return application


class _RefusedError(Exception):
    """A request that is answered with an error before it reaches the store."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _handler(route: Route, view: Callable[[str], LightningStore], polls: Polls) -> Handler:
    read = _reader(route)

    async def handle(request: web.Request) -> web.StreamResponse:
        message = await read(request)
        arguments = message if isinstance(message, dict) else {"record": message}
        context = Context(view(_run_id(request)), polls)
        result = await route.answer(context, **request.match_info, **arguments)
        return _json_response(_encode(result), route.status)

    return handle


def _events_handler(view: Callable[[str], LightningStore], polls: Polls) -> Handler:
    adapter: TypeAdapter[Subscribe] = TypeAdapter(Subscribe)

    async def handle(request: web.Request) -> web.StreamResponse:
        message = adapter.validate_python(_query(request.query))
        store = view(_run_id(request, message.get("run_id")))
        return await stream_events(request, store, message.get("kinds"), polls)

    return handle


def _reader(route: Route) -> Callable[[web.Request], Awaitable[Any]]:
    """What turns a request into the route's validated message."""
    if route.message is None:

        async def read_nothing(request: web.Request) -> Any:
            return {}

        return read_nothing
    validate = TypeAdapter(route.message).validate_python
    if route.method == "GET":

        async def read_query(request: web.Request) -> Any:
            return validate(_query(request.query))

        return read_query

    async def read_body(request: web.Request) -> Any:
        body = await request.read()
        try:
            content = from_json(body, allow_inf_nan=False) if body else {}
        except ValueError as error:
            raise _RefusedError(
                "malformed", f"the body is not JSON: {error}. JSON is UTF-8 and has no NaN and no Infinity"
            ) from error
        return validate(content)

    return read_body


def _query(query: MultiMapping[str]) -> dict[str, Any]:
    return {key: query.getall(key) if key in _LIST_KEYS else query[key] for key in query}


def _run_id(request: web.Request, given: str | None = None) -> str:
    run_id = given or request.headers.get(RUN_HEADER) or DEFAULT_RUN_ID
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id {run_id!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ : - are allowed")
    return run_id


def _encode(result: Any) -> bytes:
    if isinstance(result, Record):
        return result.__pydantic_serializer__.to_json(result)
    if isinstance(result, PaginatedResult):
        result = {field: getattr(result, field) for field in type(result).model_fields}
    return to_json(result, inf_nan_mode="null")


def _json_response(body: bytes, status: int) -> web.Response:
    return web.Response(body=body, status=status, headers={"content-type": "application/json"})


def _error_response(code: ErrorCode, message: str, status: int | None = None) -> web.Response:
    return _json_response(to_json({"code": code, "message": message}), status or ERROR_STATUS[code])


def _guard(token: str | None, features: str) -> Middleware:
    """The middleware around every request: refuses strangers, and turns exceptions into ``{code, message}``."""
    expected = None if token is None else f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if expected is None:
                _refuse_web_pages(request.host, request.headers.get("origin"))
            elif request.path != PREFIX + "/health":
                _refuse_wrong_token(request, expected)
            response = await handler(request)
        except Exception as error:  # isolation point: a request may fail, the server may not
            response = _answer_error(request, error)
        if not response.prepared:
            response.headers[FEATURES_HEADER] = features
        return response

    return guard


def _refuse_wrong_token(request: web.Request, expected: bytes) -> None:
    shown = request.headers.get("authorization", "").encode(errors="surrogateescape")
    if not hmac.compare_digest(shown, expected):
        raise _RefusedError("unauthorized", "no token or a wrong one; give the token that the store was started with")


@functools.lru_cache(maxsize=64)
def _refuse_web_pages(host: str, origin: str | None) -> None:
    """Without a token, a page in the user's browser must not reach the store, neither across sites nor by rebinding."""
    if not is_loopback(urlsplit("//" + host).hostname or "") or (origin and urlsplit(origin).netloc != host):
        raise _RefusedError(
            "forbidden", f"without a token the store answers programs on this machine only, not {origin or host!r}"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine, as seen from itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    match error:
        case _RefusedError():
            return _error_response(error.code, str(error))
        case web.HTTPRequestEntityTooLarge():
            return _error_response("too_large", f"the body is larger than {MAX_BODY_BYTES} bytes; send less at once")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            response = _error_response("no_route", f"{request.method} {request.path}: allowed are {allowed}", 405)
            response.headers["allow"] = allowed
            return response
        case web.HTTPException():
            return _error_response("no_route", f"{request.method} {request.path}: {error.reason}", error.status)
        case web.RequestPayloadError() | BadHttpMessage():
            return _error_response("malformed", f"the body cannot be read: {error}")
        case NotFoundError():
            return _error_response("not_found", str(error))
        case ConflictError():
            return _error_response("conflict", str(error))
        case ValidationError():
            return _error_response("invalid", _explain(error))
        case PydanticSerializationError():
            logger.error("%s %s: what is stored there is not JSON: %s", request.method, request.path, error)
            return _error_response("internal", f"what is stored there cannot be sent, as it is not JSON: {error}")
        case ValueError():
            return _error_response("invalid", str(error))
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return _error_response("internal", "the store failed; its log says why")


def _explain(error: ValidationError) -> str:
    """The first three complaints, each with where it is: ``rollouts.0.mode: Input should be ...``."""
    problems: list[Mapping[str, Any]] = [*error.errors(include_url=False, include_context=False, include_input=False)]
    shown = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems[:3])
    return shown if len(problems) <= 3 else f"{shown}; and {len(problems) - 3} more"
