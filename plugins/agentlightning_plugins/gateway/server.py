"""The server of the gateway, and the chain of steps that a model call passes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.errors import ConfigError
from agentlightning.records import Span
from agentlightning.semconv import distrust
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey, SpanWriter
from agentlightning_plugins.gateway.access import Authenticator, CallSeeds, EndedAttempts, InFlightCalls
from agentlightning_plugins.gateway.backends.answer_cache import AnswerCache
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.backends.provider import ModelBackend
from agentlightning_plugins.gateway.backends.upstream import HealthCheck, Upstream
from agentlightning_plugins.gateway.call import ModelCall, estimate_tokens, read_call
from agentlightning_plugins.gateway.control import PROBES, Controls, GatewayMetrics
from agentlightning_plugins.gateway.dialects.dialect import CallRefused, Dialect, load_dialects
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.history import LateSystem, SampledHistory
from agentlightning_plugins.gateway.limits import Admission, UsageLimits, UsageTracker
from agentlightning_plugins.gateway.recorder import CallRecorder
from agentlightning_plugins.gateway.relay import Relay
from agentlightning_plugins.shared.web.request import RequestRefused, check_local, is_loopback, parse_json, read_body
from agentlightning_plugins.shared.web.server import WebServer

logger = logging.getLogger("agentlightning")


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain values, which can be sent to another process. ``LLMProxy`` documents them."""

    host: str
    port: int
    num_retries: int
    require_keys: bool
    believe_urls: bool
    """Whether a call without a key belongs to the attempt in its URL."""
    limits: UsageLimits
    read_timeout_s: float
    health_interval_s: float
    pause_wait_s: float
    cache: bool
    late_system: LateSystem
    fails_attempts: bool
    finish_s: float
    operator_key: str = field(repr=False)
    """Key whose holder may operate the gateway, as with the store's token."""
    model_list: Sequence[Mapping[str, Any]] = ()
    weight_version: int | None = None
    """Version of the weights that serve the first calls."""


_PATH: Final = re.compile(r"(?:/rollout/([^/]+)/attempt/([^/]+))?/(.+?)/?")
_MODEL_PATH: Final = re.compile(r"(v1[a-z]*/models/)(.+)(:\w+)")
_FINISH_S: Final = 2.0
_EVENTS: Final = "events"
"""The path, below an attempt, to which a program written for Agent Lightning 1.0 posts events: ``AGL_EVENT_URL``."""
_MAX_EVENT_BYTES: Final = 1_000_000


class GatewayServer:
    """Relays calls to backends and sends a span of each call to the store. Belongs to one event loop."""

    def __init__(self, store: LightningStore, settings: Settings) -> None:
        """Prepares a server; raises ConfigError if the model list is invalid."""
        self._store = store
        self._settings = settings
        self._dialects = load_dialects()
        self._models = ModelTable(settings.model_list)
        self._authenticator = Authenticator(
            store,
            is_required=settings.require_keys,
            believes_urls=settings.believe_urls,
            operator_key=settings.operator_key,
        )
        self._is_local = is_loopback(settings.host) and not settings.require_keys
        self._usage = UsageTracker(settings.limits)
        self._seeds = CallSeeds(store)
        self._admission = Admission(pause_wait_s=settings.pause_wait_s)
        self._admission.weight_version = settings.weight_version
        self._in_flight = InFlightCalls()
        self._ended = EndedAttempts(self._in_flight)
        self._writer = SpanWriter.shared(store)  # shared, so that a wait for an attempt's spans includes ours
        self._metrics = GatewayMetrics(self._models, self._admission, self._writer, self._in_flight)
        self._controls = Controls(
            self._authenticator,
            self._models,
            self._admission,
            self._in_flight,
            self._writer,
            self._metrics,
            self._dialects,
            lambda: self._server.is_stopping,
        )
        self._cache = AnswerCache() if settings.cache else None
        self._history = SampledHistory(settings.late_system)
        self._recorder = CallRecorder(
            store, self._writer, self._usage, self._metrics, self._cache, self._ended, settings.fails_attempts
        )
        self._relay = Relay(self._recorder, settings.read_timeout_s, self._cache is not None)
        self._server = WebServer(self._handle, finish_s=_FINISH_S)

    async def start(self) -> int:
        """Starts serving and returns the port; raises ConfigError if the address is not available."""
        settings = self._settings
        if self._cache is not None:
            await self._cache.load(self._store)
        self._upstream = Upstream(settings.num_retries, settings.read_timeout_s)
        try:
            bound = await self._server.start(settings.host, settings.port, backlog=1024)
        except ConfigError:
            await self._upstream.close()
            self._writer.release()
            raise
        health = HealthCheck(self._models, settings.health_interval_s)
        works = (self._ended.follow(self._store), health.run(), self._models.follow_keys())
        self._background = [asyncio.create_task(work) for work in works]
        return bound

    async def stop(self) -> None:
        """Waits for the calls in flight, ends late ones with an error, and stores the recorded spans."""
        self._admission.close()
        await self._server.stop_listening()
        if not await self._admission.drain(self._settings.finish_s):
            self._in_flight.cancel_all(CallRefused(503, "the gateway stops; send the call again", "stopping"))
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._server.stop()
        await self._upstream.close()
        await self.flush()
        self._writer.release()

    async def set_models(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        self._models.update(model_list)

    async def flush(self) -> None:
        await self._writer.flush()

    async def execute(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._controls.execute(path, body)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        dialect: Dialect | None = None
        try:
            if self._is_local:
                check_local(request, "a gateway that requires no keys")
            target = _PATH.fullmatch(request.path)
            path, fields = self._read_route(target[3] if target is not None else "")
            named = (target[1], target[2]) if target is not None and target[1] is not None else None
            dialect = self._dialects.get(path)
            if path == _EVENTS and named is not None:
                return await self._take_event(request, named)
            if dialect is None:
                if path not in PROBES and self._authenticator.is_operator(request.headers):
                    self._server.admit(request)
                return await self._controls.answer(request, path, named)
            if self._server.is_stopping:
                raise CallRefused(503, "the gateway stops", "stopping", {"Retry-After": "1", "Connection": "close"})
            call = await self._read_call(request, dialect, named, {**fields, **dialect.route_fields})
        except RequestRefused as error:
            return self._refuse(CHAT, CallRefused(error.status, str(error), "not_local"))
        except CallRefused as error:
            return self._refuse(dialect or CHAT, error)
        return await self._answer_call(call, request)

    def _read_route(self, path: str) -> tuple[str, dict[str, str]]:
        """Returns the route of a path, and the model that it names, as in Google's API."""
        found = _MODEL_PATH.fullmatch(path)
        route = "" if found is None else f"{found[1]}{{model}}{found[3]}"
        return (path, {}) if found is None or route not in self._dialects else (route, {"model": found[2]})

    async def _read_call(
        self, request: web.BaseRequest, dialect: Dialect, named: AttemptKey | None, fields: Mapping[str, Any]
    ) -> ModelCall:
        """Reads the call of an attempt that has not ended; a CallRefused here is not recorded as a call."""
        attempt = self._authenticator.authenticate(request.headers, named)
        self._server.admit(request)
        if attempt is None:
            return await read_call(request, dialect, None, fields)
        await self._ended.ask(self._store, attempt)
        self._ended.refuse(attempt)
        call = await read_call(request, dialect, attempt, fields)
        call.history = self._history
        await self._usage.restore(self._store, attempt)
        self._ended.refuse(attempt)  # it may have ended since
        return call

    async def _take_event(self, request: web.BaseRequest, named: AttemptKey) -> web.Response:
        """Stores an event of the agent of an attempt that has not ended; the answer waits until it is stored."""
        attempt = self._authenticator.authenticate(request.headers, named)
        if attempt is None:
            raise CallRefused(401, "an event needs the key of its attempt", "wrong_key")
        self._server.admit(request)
        await self._ended.ask(self._store, attempt)
        self._ended.refuse(attempt)
        try:
            body = await parse_json(await read_body(request, _MAX_EVENT_BYTES, _MAX_EVENT_BYTES))
        except RequestRefused as error:
            raise CallRefused(error.status, f"event: {error}", "invalid_request") from None
        if not self._writer.put(_read_event(body, attempt)):
            raise CallRefused(503, "the gateway has too many spans to store; post the event again", "overloaded")
        await self._writer.flush(*attempt)
        return web.json_response({"stored": True})

    async def _answer_call(self, call: ModelCall, request: web.BaseRequest) -> web.StreamResponse:
        """Takes a call through the chain, and records how it ended."""
        try:
            return await self._pass_through_chain(call, request)
        except CallRefused as error:
            response = self._recorder.refuse(call, error)
            await self._recorder.wait_until_stored(call)
            return response
        except asyncio.CancelledError:  # by aiohttp, because the client disconnected
            self._recorder.abandon(call)
            raise
        except Exception as error:  # isolation point: dialects and providers may be third-party code
            logger.exception("a call of model %r failed inside the gateway", call.model)
            failure = CallRefused(500, f"the gateway failed: {type(error).__name__}", "internal_error")
            response = self._recorder.refuse(call, failure)
            if call.is_streaming:
                raise
            return response

    async def _pass_through_chain(self, call: ModelCall, request: web.BaseRequest) -> web.StreamResponse:
        """The chain: each step may raise CallRefused, and the last one records the call."""
        if call.attempt is not None and call.body.get("background"):
            message = "background: true is not supported: the answer would be neither recorded nor counted"
            raise CallRefused(400, message, "unsupported_field")
        backends = self._models.route(call.model, call.attempt and call.attempt[0], time.monotonic())
        with self._in_flight.track(call) as in_flight:
            await self._admission.enter()
            try:
                estimate = self._estimate(call, backends[0])
                reserved = self._usage.reserve(call.attempt, *estimate, generates=call.generates)
                async with reserved, self._seeds.seeded(call, backends):
                    call.gateway_version = self._admission.weight_version
                    answer = self._cache.find(call, backends) if self._cache is not None else None
                    answer = answer or await self._upstream.send(call, backends, request.headers)
                    return await self._relay.relay(in_flight, answer, request)
            finally:
                self._admission.leave()

    def _estimate(self, call: ModelCall, backend: ModelBackend) -> tuple[int, float]:
        """Returns about how many tokens a call may use, and their cost; 0 if no limit needs them."""
        if not self._usage.reads_requests or call.attempt is None:
            return 0, 0.0
        tokens = estimate_tokens(call, backend)
        return sum(tokens), 0.0 if backend.price is None else backend.price.cost(*tokens)

    def _refuse(self, dialect: Dialect, refusal: CallRefused) -> web.Response:
        """Answers a request that is not recorded as a call."""
        self._metrics.refuse(refusal.status)
        return refusal.to_response(dialect)


def _read_event(body: Any, attempt: AttemptKey) -> Span:
    """Returns the span of an event ``{"event_type": ..., "data": {...}}``: a reward, or an annotation of another type.

    Raises CallRefused if the body is not an event, or its reward is not a number.
    """
    kind, data = (body.get("event_type"), body.get("data")) if isinstance(body, Mapping) else (None, None)
    if not (isinstance(kind, str) and kind and isinstance(data, Mapping)):
        raise CallRefused(400, 'an event is {"event_type": TEXT, "data": {...}}', "invalid_request")
    try:
        if kind == "reward":
            span = emit_reward(data.get("value"), attributes={"event": data}, propagate=False)  # type: ignore[arg-type] # it checks
        else:
            span = emit_annotation({"event_type": kind, "event": data}, propagate=False)
    except ConfigError as error:
        raise CallRefused(400, f"event {kind!r}: {error}", "invalid_request") from None
    rollout_id, attempt_id = attempt
    now = time.time()
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": os.urandom(16).hex()}
    return distrust(span.model_copy(update={**ids, "start_time": now, "end_time": now}))
