"""The aiohttp application: the REST routes, OTLP, events, metrics and the OpenAPI document."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ConfigDict, Field, TypeAdapter, with_config
from pydantic_core import to_json
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import QuotaError, StorageFullError
from agentlightning.run.attempt_token import AttemptToken
from agentlightning.store.check import RUN_ID, check_run_id
from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.shared.log_setup import access_logger
from agentlightning_plugins.shared.web.metrics import CONTENT_TYPE
from agentlightning_plugins.shared.web.server import WebServer
from agentlightning_plugins.stores.http.message import FEATURES_HEADER, MAX_POLL_S, PREFIX, RUN_HEADER, TIME_HEADER
from agentlightning_plugins.stores.http.route import Route
from agentlightning_plugins.stores.http.server import openapi, otlp
from agentlightning_plugins.stores.http.server.access import (
    HEALTH_PATH,
    OPEN_PATHS,
    StoreAccess,
    check_attempt,
    count_refused,
    screen_spans,
    spans_of,
)
from agentlightning_plugins.stores.http.server.answer import (
    RefusedError,
    describe_error,
    encode,
    error_response,
    json_response,
)
from agentlightning_plugins.stores.http.server.body import ATTEMPT_LIMITS, STORE_LIMITS, Limits, make_reader, read_query
from agentlightning_plugins.stores.http.server.events import EventStreams
from agentlightning_plugins.stores.http.server.metrics import ServerMetrics
from agentlightning_plugins.stores.http.server.polling import Polls
from agentlightning_plugins.stores.http.server.routes import ROUTES, Context, make_handler


class Pages(Protocol):
    """HTML pages. They check access themselves, because a browser sends a cookie and not the store's token."""

    def routes(self) -> Iterable[web.RouteDef]:
        """Returns the routes, outside of ``/v1``. Their handlers also answer requests that are not admitted."""
        ...

    def admits(self, request: web.Request) -> bool:
        """Whether a request comes from a client that has signed in; others keep their connection only briefly."""
        ...

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Accepts these tokens of the store from now on."""
        ...

    async def stop(self) -> None:
        """Ends open-ended answers, such as streams."""
        ...


logger = logging.getLogger("agentlightning")

OTLP_PATH: Final = "/v1/traces"

_FINISH_S: Final = 6.0
_FULL_S: Final = 30.0
"""How long probes fail after a write found the disk full."""
_TOKEN: Final = web.RequestKey("token", AttemptToken)
"""The attempt token of a request; absent if the request may do everything."""


class StoreApplication:
    """The REST API over one store."""

    def __init__(self, store: LightningStore, tokens: Sequence[str] = (), pages: Sequence[Pages] = ()) -> None:
        """Creates the application.

        Args:
            store: its ``with_run`` gives the view of each run.
            tokens: clients send one as ``Authorization: Bearer``; without any, programs on this machine need none.
            pages: the pages that are served in addition to the API.
        """
        self._view = functools.lru_cache(maxsize=128)(store.with_run)
        self._polls = Polls()
        self._streams = EventStreams(self._view)
        self._metrics = ServerMetrics(store, self._polls, self._streams)
        self._access = StoreAccess(tokens, store.now)
        self._problem: str | None = None
        """Result of the last probe; logged when it changes."""
        self._full_until = 0.0
        """When a write may be tried again after one failed because the disk was full."""
        self._store = store
        features = {**store.capabilities, "otlp_traces": True}
        guard = self._guard(",".join(name for name, able in features.items() if able))
        application = web.Application(middlewares=[guard])
        router = application.router
        for route in ROUTES:
            router.add_route(route.method, PREFIX + route.path, self._handler(route))
        for (method, path), (handler, _) in self._others().items():
            router.add_route(method, path, handler)
        self._pages = {route: each for each in pages for routed in each.routes() for route in routed.register(router)}
        self.server = WebServer(application, finish_s=_FINISH_S)

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Accepts these tokens from now on."""
        self._access.replace_tokens(tokens)
        for pages in set(self._pages.values()):
            pages.replace_tokens(tokens)

    async def end_refused_streams(self) -> None:
        """Ends the event streams whose token is no longer accepted."""
        self._streams.end_unless(self._access.admits)

    async def stop(self) -> None:
        """Ends waiting requests with their results so far, ends event streams, and finishes the other requests."""
        await self.server.stop_listening()
        self._polls.stop()
        await self._streams.stop()
        for pages in set(self._pages.values()):
            await pages.stop()
        await self.server.stop()

    def forget(self) -> None:
        """Drops all references: aiohttp caches handlers longer than the server runs, and they refer to this object."""
        vars(self).clear()

    def _others(self) -> dict[tuple[str, str], tuple[Handler, openapi.Operation]]:
        return {
            ("GET", PREFIX + "/events"): (self._answer_events, _EVENTS),
            ("POST", OTLP_PATH): (self._answer_otlp, _OTLP),
            ("GET", "/livez"): (self._answer_live, _LIVE),
            ("GET", "/readyz"): (self._answer_ready, _READY),
            ("GET", "/metrics"): (self._answer_metrics, _METRICS),
            ("GET", "/openapi.json"): (self._answer_openapi, _OPENAPI),
        }

    def _handler(self, route: Route) -> Handler:
        read, answer = make_reader(route), make_handler(route)

        async def handle(request: web.Request) -> web.StreamResponse:
            token = request.get(_TOKEN)
            if token is not None and not route.for_attempts:
                check_attempt(token, None)
            arguments = {**request.match_info, **await read(request, _limits(token))}
            if token is not None:
                check_attempt(token, arguments)
            await self._screen(token, arguments)
            context = Context(self._view(_run_id(request)), self._polls, self._access)
            try:
                result = await answer(context, arguments)
            except QuotaError:
                if token is not None:  # other clients count what they lose
                    await count_refused(self._store, token.rollout_id, token.attempt_id, len(spans_of(arguments) or ()))
                raise
            return json_response(encode(result), route.status)

        return handle

    async def _screen(self, token: AttemptToken | None, arguments: dict[str, Any]) -> None:
        spans = spans_of(arguments)
        if spans is not None:
            spans, reasons = await screen_spans(self._store, token, spans)
            if reasons:
                self._metrics.refused_spans.inc(len(reasons))
                raise RefusedError("invalid" if token is None else "forbidden", reasons[0])
            arguments.update({"record": spans[0]} if "record" in arguments else {"spans": spans})

    async def _answer_events(self, request: web.Request) -> web.StreamResponse:
        _refuse_attempt_token(request)
        message = _subscription.validate_python(read_query(request.query))
        run_id = None if message.get("every_run") else _run_id(request, message.get("run_id"))
        return await self._streams.answer(
            request, run_id, message.get("kinds"), request.headers.get("last-event-id"), message.get("poll_s")
        )

    async def _answer_otlp(self, request: web.Request) -> web.StreamResponse:
        token = request.get(_TOKEN)
        export = await otlp.read_request(request, _limits(token))
        response = await otlp.export_spans(export, self._store, token, _limits(token).batch)
        self._metrics.refused_spans.inc(response.partial_success.rejected_spans)
        return web.Response(body=otlp.write_response(response, request.content_type), content_type=request.content_type)

    async def _answer_metrics(self, request: web.Request) -> web.StreamResponse:
        _refuse_attempt_token(request)
        return web.Response(body=await self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _answer_live(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _answer_ready(self, request: web.Request) -> web.StreamResponse:
        if self.server.is_stopping:
            return web.Response(text="stopping\n", status=503)
        if time.monotonic() < self._full_until:
            return web.Response(text="the disk of the database is full\n", status=503)
        problem = await self._metrics.find_problem()
        if problem is not None and problem != self._problem:
            logger.warning("requests cannot be served: %s", problem)
        self._problem = problem
        if problem is None:
            return web.Response(text="ok\n")
        # Not the reason, which may name the database's host and user, because a probe needs no token.
        return web.Response(text="the database cannot be used; the server's log has the reason\n", status=503)

    def _note_full_disk(self, error: StorageFullError) -> None:
        """Makes probes fail for a while: the server has no other way to find out whether writes succeed again."""
        now = time.monotonic()
        if now >= self._full_until:
            logger.warning("writes fail: %s", error)
        self._full_until = now + _FULL_S

    async def _answer_openapi(self, request: web.Request) -> web.StreamResponse:
        _refuse_attempt_token(request)
        return json_response(self._openapi)

    @functools.cached_property
    def _openapi(self) -> bytes:
        return to_json(openapi.describe(ROUTES, {key: operation for key, (_, operation) in self._others().items()}))

    def _guard(self, features: str) -> Middleware:
        """Makes the middleware that checks access, counts requests, and turns exceptions into answers."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            began = time.perf_counter()
            try:
                pages = self._pages.get(request.match_info.route)
                token = self._access.admit(request) if pages is None else None
                is_known = request.path not in (HEALTH_PATH, *OPEN_PATHS) if pages is None else pages.admits(request)
                if is_known:
                    self.server.admit(request)
                if token is not None:
                    request[_TOKEN] = token
                response = await handler(request)
            except Exception as error:  # isolation point: a request may fail, the server may not
                if isinstance(error, StorageFullError):
                    self._note_full_disk(error)
                response = _answer_error(request, error)
            if not response.prepared:
                response.headers[FEATURES_HEADER] = features
                response.headers[TIME_HEADER] = f"{self._store.now():.3f}"
            resource = request.match_info.route.resource
            route = "" if resource is None else resource.canonical
            seconds = time.perf_counter() - began
            self._metrics.record(request.method, route, response.status, seconds)
            if access_logger.isEnabledFor(logging.INFO):
                fields = {"method": request.method, "path": request.path, "status": response.status, "seconds": seconds}
                access_logger.info("%s %s %d %.3f s", *fields.values(), extra={"fields": fields})
            return response

        return guard


def _limits(token: AttemptToken | None) -> Limits:
    return STORE_LIMITS if token is None else ATTEMPT_LIMITS


def _answer_error(request: web.Request, error: Exception) -> web.Response:
    if request.path == OTLP_PATH and request.content_type == otlp.PROTOBUF:
        code, message, status = describe_error(request, error)
        return web.Response(body=otlp.write_status(code, message, status), status=status, content_type=otlp.PROTOBUF)
    return error_response(request, error)


def _run_id(request: web.Request, given: str | None = None) -> str:
    return check_run_id(given or request.headers.get(RUN_HEADER) or DEFAULT_RUN_ID)


def _refuse_attempt_token(request: web.Request) -> None:
    token = request.get(_TOKEN)
    if token is not None:
        check_attempt(token, None)


@with_config(ConfigDict(extra="forbid"))
class _Subscription(TypedDict, total=False):
    kinds: list[str] | None
    run_id: str
    every_run: bool
    poll_s: Annotated[float, Field(ge=0, le=MAX_POLL_S)]


_subscription: Final = TypeAdapter(_Subscription)

_TEXT: Final = {"schema": {"type": "string"}}
_OBJECT: Final = {"schema": {"type": "object"}}
_ERROR: Final = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}}
_EVENTS: Final[openapi.Operation] = {
    "summary": "The events of a run as they happen, as server-sent events.",
    "tags": ["events"],
    "parameters": [
        {"name": "kinds", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
        {"name": "run_id", "in": "query", "schema": {"type": "string", "pattern": f"^{RUN_ID.pattern}$"}},
        {"name": "every_run", "in": "query", "schema": {"type": "boolean"}},
        {"name": "poll_s", "in": "query", "schema": {"type": "number", "minimum": 0, "maximum": MAX_POLL_S}},
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
            "description": "The spans are stored, except those that `partialSuccess` counts.",
            "content": {otlp.PROTOBUF: _TEXT, otlp.JSON: _OBJECT},
        },
        "400": {"description": "Error: malformed.", **_ERROR},
        "413": {"description": "Error: too_large.", **_ERROR},
    },
}


def _plain(summary: str, tag: str, content: dict[str, Any], **others: str) -> openapi.Operation:
    """Returns an operation without arguments; ``others`` are descriptions of statuses other than 200."""
    responses = {status: {"description": text, "content": content} for status, text in others.items()}
    answered = {"200": {"description": "The answer.", "content": content}, **responses}
    return {"summary": summary, "tags": [tag], "responses": answered}


_PLAIN_TEXT: Final = {"text/plain": _TEXT}
_METRICS: Final = _plain("Requests, rollouts, queue and workers, in Prometheus' text format.", "metrics", _PLAIN_TEXT)
_LIVE: Final = _plain("Whether the process answers.", "health", _PLAIN_TEXT)
_READY: Final = _plain(
    "Whether requests can be served: the database answers, and no newer version has changed its schema.",
    "health",
    _PLAIN_TEXT,
    **{"503": "Not ready; the log has the reason."},
)
_OPENAPI: Final = _plain("This document: OpenAPI 3.1.", "metrics", {"application/json": _OBJECT})
