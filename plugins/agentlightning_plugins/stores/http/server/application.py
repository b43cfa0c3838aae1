"""The aiohttp application: the REST routes, OTLP, events, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ConfigDict, TypeAdapter, with_config
from pydantic_core import to_json
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import ConfigError
from agentlightning.run.attempt_token import AttemptToken
from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.stores.http.message import FEATURES_HEADER, MAX_BODY_BYTES, PREFIX, RUN_HEADER
from agentlightning_plugins.stores.http.route import Route
from agentlightning_plugins.stores.http.server import openapi, otlp
from agentlightning_plugins.stores.http.server.access import Access, check_attempt
from agentlightning_plugins.stores.http.server.answer import describe_error, encode, error_response, json_response
from agentlightning_plugins.stores.http.server.body import make_reader, read_query
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.metrics import CONTENT_TYPE, ServerMetrics
from agentlightning_plugins.stores.http.server.polling import Polls
from agentlightning_plugins.stores.http.server.routes import ROUTES, Context, make_handler

OTLP_PATH: Final = "/v1/traces"

_ARRIVAL_S: Final = 0.1
"""How long a request sent before the end may take to arrive."""
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_TOKEN: Final[Any] = web.RequestKey("token", AttemptToken) if hasattr(web, "RequestKey") else "token"  # new in 3.14
"""The attempt token of a request; absent if the request may do everything."""


class StoreApplication:
    """The REST API over one store."""

    def __init__(self, store: LightningStore, token: str | None) -> None:
        """Creates the application.

        Args:
            store: its ``with_run`` gives the view of each run.
            token: the token that clients send as ``Authorization: Bearer``; None admits programs on this machine.
        """
        self._view = functools.lru_cache(maxsize=128)(store.with_run)
        self._polls = Polls()
        self._streams = EventStreams(self._view)
        self._metrics = ServerMetrics(store, self._polls, self._streams)
        self._access = Access(token)
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._stopping = False
        self._store = store
        features = {**store.capabilities, "otlp_traces": True}
        guard = self._guard(",".join(name for name, able in features.items() if able))
        self.application = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
        router = self.application.router
        for route in ROUTES:
            router.add_route(route.method, PREFIX + route.path, self._handler(route))
        for (method, path), (handler, _) in self._others().items():
            router.add_route(method, path, handler)

    async def stop(self, timeout_s: float) -> None:
        """Ends waiting requests with what they have and the streams of events, and waits until the others are answered.

        aiohttp waits for handlers too, but does not read meanwhile, so a request whose body is under way would be lost.
        """
        self._stopping = True
        self._polls.stop()
        await self._streams.stop()
        await asyncio.sleep(_ARRIVAL_S)
        if self._in_flight:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()

    def _others(self) -> dict[tuple[str, str], tuple[Handler, openapi.Operation]]:
        return {
            ("GET", PREFIX + "/events"): (self._answer_events, _EVENTS),
            ("POST", OTLP_PATH): (self._answer_otlp, _OTLP),
            ("GET", "/metrics"): (self._answer_metrics, _METRICS),
            ("GET", "/openapi.json"): (self._answer_openapi, _OPENAPI),
        }

    def _handler(self, route: Route) -> Handler:
        read, answer = make_reader(route), make_handler(route)

        async def handle(request: web.Request) -> web.StreamResponse:
            arguments = {**request.match_info, **await read(request)}
            token = request.get(_TOKEN)
            if token is not None:
                check_attempt(token, arguments if route.for_attempts else None)
            context = Context(self._view(_run_id(request)), self._polls, self._access)
            return json_response(encode(await answer(context, arguments)), route.status)

        return handle

    async def _answer_events(self, request: web.Request) -> web.StreamResponse:
        _refuse_attempt_token(request)
        message = _subscription.validate_python(read_query(request.query))
        run_id = _run_id(request, message.get("run_id"))
        return await self._streams.answer(request, run_id, message.get("kinds"), request.headers.get("last-event-id"))

    async def _answer_otlp(self, request: web.Request) -> web.StreamResponse:
        export = otlp.read_request(await request.read(), request.content_type)
        response = await otlp.export_spans(export, self._store, request.get(_TOKEN))
        return web.Response(body=otlp.write_response(response, request.content_type), content_type=request.content_type)

    async def _answer_metrics(self, request: web.Request) -> web.StreamResponse:
        _refuse_attempt_token(request)
        return web.Response(body=await self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _answer_openapi(self, request: web.Request) -> web.StreamResponse:
        _refuse_attempt_token(request)
        return json_response(self._openapi)

    @functools.cached_property
    def _openapi(self) -> bytes:
        return to_json(openapi.describe(ROUTES, {key: operation for key, (_, operation) in self._others().items()}))

    def _guard(self, features: str) -> Middleware:
        """The middleware around every request: checks access, counts, and turns exceptions into answers."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            began = time.perf_counter()
            self._in_flight += 1
            try:
                token = self._access.admit(request)
                if token is not None:
                    request[_TOKEN] = token
                response = await handler(request)
            except Exception as error:  # isolation point: a request may fail, the server may not
                response = _answer_error(request, error)
            finally:
                self._in_flight -= 1
                if self._stopping and not self._in_flight:
                    self._idle.set()
            if self._stopping:
                response.force_close()
            if not response.prepared:
                response.headers[FEATURES_HEADER] = features
            resource = request.match_info.route.resource
            route = "" if resource is None else resource.canonical
            self._metrics.record(request.method, route, response.status, time.perf_counter() - began)
            return response

        return guard


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    if request.path == OTLP_PATH and request.content_type == otlp.PROTOBUF:
        code, message, status = describe_error(request, error)
        return web.Response(body=otlp.write_status(code, message, status), status=status, content_type=otlp.PROTOBUF)
    return error_response(request, error)


def _run_id(request: web.Request, given: str | None = None) -> str:
    run_id = given or request.headers.get(RUN_HEADER) or DEFAULT_RUN_ID
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(f"run id {run_id!r}: 1 to 200 of the characters A-Z a-z 0-9 . _ : - are allowed")
    return run_id


def _refuse_attempt_token(request: web.Request) -> None:
    token = request.get(_TOKEN)
    if token is not None:
        check_attempt(token, None)


@with_config(ConfigDict(extra="forbid"))
class _Subscription(TypedDict, total=False):
    kinds: list[str] | None
    run_id: str


_subscription: Final = TypeAdapter(_Subscription)

_TEXT: Final = {"schema": {"type": "string"}}
_OBJECT: Final = {"schema": {"type": "object"}}
_ERROR: Final = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}}
_EVENTS: Final[openapi.Operation] = {
    "summary": "The events of a run as they happen, as server-sent events.",
    "tags": ["events"],
    "parameters": [
        {"name": "kinds", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
        {"name": "run_id", "in": "query", "schema": {"type": "string", "pattern": _RUN_ID.pattern}},
        {"name": "last-event-id", "in": "header", "schema": {"type": "string"}},
    ],
    "responses": {"200": {"description": "A stream.", "content": {"text/event-stream": _TEXT}}},
}
_OTLP: Final[openapi.Operation] = {
    "summary": "Stores traces sent by OTLP, the export protocol of OpenTelemetry.",
    "tags": ["spans"],
    "requestBody": {"required": True, "content": {otlp.PROTOBUF: _TEXT, otlp.JSON: _OBJECT}},
    "responses": {
        "200": {
            "description": "Stored, except those that `partialSuccess` counts.",
            "content": {otlp.PROTOBUF: _TEXT, otlp.JSON: _OBJECT},
        },
        "400": {"description": "Error: malformed.", **_ERROR},
        "413": {"description": "Error: too_large.", **_ERROR},
    },
}
_METRICS: Final[openapi.Operation] = {
    "summary": "Requests, rollouts, queue and workers, for Prometheus.",
    "tags": ["metrics"],
    "responses": {"200": {"description": "Prometheus' text format.", "content": {"text/plain": _TEXT}}},
}
_OPENAPI: Final[openapi.Operation] = {
    "summary": "This document.",
    "tags": ["metrics"],
    "responses": {"200": {"description": "OpenAPI 3.1.", "content": {"application/json": _OBJECT}}},
}
